"""Free text, a trigger, and what may follow it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammars import COMPILER, CONTROL_IDS, END_IDS, allowed, spell, start, takes, walk, word, written
from outrider.constraints.walker import GrammarConstraint
from outrider.core.data import Grammar
from outrider.core.errors import ConstraintError, GrammarError
from outrider.core.params import FastForward

THINK, TOOL = CONTROL_IDS["</think>"], CONTROL_IDS["<tool>"]
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"],'
    ' "additionalProperties": false}'
)
ANSWER = '{"name": true}'


def thinking(mode: FastForward = "exact") -> GrammarConstraint:
    return start(Grammar("json_schema", SCHEMA, after="</think>", fast_forward=mode))


STARTS_OF_THE_ANSWER = [ord("{"), word('{"')]


@pytest.mark.parametrize(
    "lead",
    [
        spell("</think>"),
        [word("</think>")],
        [THINK],
        [*spell("so: </thi</think"), ord(">")],
        [*spell("a"), word("</"), word("think"), ord(">")],
        [*spell("e\n"), TOOL, *spell("{}"), TOOL, THINK],
        [TOOL, word("</think>")],
    ],
)
@pytest.mark.parametrize("mode", ["exact", "canonical", "off"])
def test_behind_the_trigger_only_the_answer_is_allowed(lead: list[int], mode: FastForward) -> None:
    constraint = thinking(mode)
    assert not set(END_IDS) & set(allowed(constraint))
    assert constraint.permits((), lead) == len(lead)
    after = allowed(constraint, lead)
    assert after == (STARTS_OF_THE_ANSWER[1:] if mode == "canonical" else STARTS_OF_THE_ANSWER)
    for i in range(len(lead)):
        assert set(spell("xyz")) < set(allowed(constraint, lead[:i]))
    constraint.accept(lead)
    assert allowed(constraint) == after
    constraint.accept([word('{"'), word("name"), word('": ')])
    constraint.accept(spell("true"))
    assert not constraint.is_complete
    constraint.accept(spell("}"))
    assert constraint.is_complete


def test_a_token_may_hold_the_end_of_the_trigger_and_the_beginning_of_the_answer() -> None:
    constraint = thinking()
    lead = spell("hm</think")
    assert {ord(">"), word(">{"), word('>{"')} <= set(allowed(constraint, lead))
    assert word(">\n") not in allowed(constraint, lead)
    assert constraint.permits((), [*lead, word(">\n")]) == len(lead)
    assert allowed(constraint, [*lead, word(">{")]) == [ord('"')]
    constraint.accept([*lead, word('>{"')])
    assert constraint.forced(()) == (word("name"), word('": '))


def test_a_draft_over_the_trigger_is_cut_where_the_answer_forbids_it() -> None:
    constraint = thinking()
    draft = [*spell("ok"), THINK, *spell("\n\n{")]
    assert constraint.permits((), draft) == 3
    with pytest.raises(ConstraintError):
        constraint.allowed(draft)
    assert constraint.permits((), [*spell("ok"), THINK, END_IDS[0]]) == 3
    assert set(spell("xyz")) < set(allowed(constraint))


def test_a_trigger_may_be_a_control_token_with_text_around_it() -> None:
    grammar = Grammar("choice", '["yes", "no"]', after="so<tool>x\n")
    constraint = start(grammar)
    after = [ord("n"), ord("y")]
    for lead in ([*spell("a so"), TOOL, *spell("x\n")], spell("a so<tool>x\n")):
        assert allowed(constraint, lead) == after
    for lead in ([*spell("a"), TOOL, *spell("x\n")], [*spell("so"), TOOL, *spell("y")]):
        assert ord("z") in allowed(constraint, lead)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "[ab]+!", after="</think>"),
        Grammar("gbnf", 'root ::= [ab]+ "!" | "(" root ")"', after="</think>"),
        Grammar("lark", 'start: WORD "!"\nWORD: /[ab]+/', after="</think>"),
        Grammar("json", after="</think>"),
    ],
)
def test_every_kind_of_grammar_may_stand_behind_a_trigger(grammar: Grammar) -> None:
    answer = "17" if grammar.kind == "json" else "aba!"
    constraint = start(grammar)
    assert takes(constraint, f"free text</think>{answer}")
    assert not takes(constraint, f"free text</think>x{answer}") and not takes(constraint, answer)
    constraint.accept([*spell("free"), THINK, *spell(answer)])
    assert constraint.is_accepted


@given(st.integers(0, 2**32), st.sampled_from(["exact", "canonical", "off"]))
def test_a_random_walk_ends_in_an_answer(seed: int, mode: FastForward) -> None:
    rng = random.Random(seed)
    constraint = thinking(mode)
    free = walk(constraint, rng, most=10)
    if THINK not in free and b"</think>" not in written(free):
        while constraint.permits((), [THINK]) == 0:  # inside a character
            constraint.accept([rng.choice(allowed(constraint))])
        constraint.accept([THINK])
        assert written(walk(constraint, rng, most=40)) in (b'{"name": true}', b'{"name": false}')
        assert constraint.is_complete


def test_broken_triggers_and_broken_grammars_behind_them_are_refused() -> None:
    with pytest.raises(GrammarError, match="after"):
        COMPILER.compile(Grammar("json", after=""))
    with pytest.raises(GrammarError, match="surrogate"):
        COMPILER.compile(Grammar("json", after="\ud800"))
    with pytest.raises(GrammarError, match="line 1"):
        COMPILER.compile(Grammar("lark", "start: nowhere", after="x"))
    with pytest.raises(GrammarError, match="nothing"):
        COMPILER.compile(Grammar("regex", r"[^\s\S]", after="x"))
