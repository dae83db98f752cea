"""Constraints as the engine uses them: masks, questions after drafts, forced tokens, the end."""

import gc
import json
import random
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammars import (
    COMPILER,
    CONTROL_IDS,
    END_IDS,
    VOCABULARY,
    allowed,
    spell,
    start,
    takes,
    walk,
    word,
    written,
)
from outrider.backends.fake import FakeVocabulary
from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.data import Grammar
from outrider.core.errors import ConstraintError, GrammarError, SettingError
from outrider.core.params import FastForward
from vocabularies import TableVocabulary, Token, bytes_and

RECORD = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "kind": {"enum": ["amber", "ambient", "néon"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["name", "kind", "tags"],
        "additionalProperties": False,
    }
)
EXPRESSION = 'root ::= term ("+" term){0,2}\nterm ::= [0-9]{1,2} | "(" root ")"\n'
ANSWERS = '["yes", "yes please", "no", "né\\"\\n"]'
CODE = r"[ab]{2,4}-\d{1,3}(é|\n)?"

GRAMMARS = [
    Grammar("json_schema", RECORD),
    Grammar("json_schema", RECORD, style="compact"),
    Grammar("regex", CODE),
    Grammar("choice", ANSWERS),
    Grammar("gbnf", EXPRESSION),
    Grammar("lark", 'start: "a" name\nname: "name" ("ab" | "me"){1,3}'),
    Grammar("json_schema", RECORD, after="</think>"),
    Grammar("choice", ANSWERS, after="<tool>"),
]
MODES: tuple[FastForward, ...] = ("exact", "canonical", "off")

grammars = st.sampled_from(GRAMMARS)
modes = st.sampled_from(MODES)
seeds = st.integers(0, 2**32)


def with_mode(grammar: Grammar, mode: FastForward) -> Grammar:
    return replace(grammar, fast_forward=mode)


def draft(constraint: GrammarConstraint, rng: random.Random, length: int) -> list[int]:
    """Drafted tokens of which each is allowed, ending before an end token."""
    tokens: list[int] = []
    while len(tokens) < length:
        token = rng.choice(allowed(constraint, tokens))
        if token in END_IDS:
            break
        tokens.append(token)
    return tokens


def masks(constraint: GrammarConstraint, drafted: list[int]) -> list[list[int]]:
    return [allowed(constraint, drafted[:i]) for i in range(len(drafted) + 1)]


# The state are the final tokens


@given(grammars, modes, seeds)
def test_masks_behind_a_draft_are_those_behind_final_tokens(
    grammar: Grammar, mode: FastForward, seed: int
) -> None:
    rng = random.Random(seed)
    one, other = start(with_mode(grammar, mode)), start(with_mode(grammar, mode))
    drafted = draft(one, rng, 12)
    expected = []
    for token in drafted:
        expected.append(allowed(other))
        other.accept([token])
    expected.append(allowed(other))
    assert masks(one, drafted) == expected
    places = list(range(len(drafted) + 1))
    rng.shuffle(places)
    for place in places:
        assert allowed(one, drafted[:place]) == expected[place]


@given(grammars, modes, seeds)
def test_questions_change_nothing(grammar: Grammar, mode: FastForward, seed: int) -> None:
    rng = random.Random(seed)
    asked, quiet = start(with_mode(grammar, mode)), start(with_mode(grammar, mode))
    for _ in range(6):
        if quiet.is_complete:
            break
        ask(asked, rng)
        assert allowed(asked) == allowed(quiet)
        assert asked.is_accepted == quiet.is_accepted
        tokens = draft(quiet, rng, rng.randint(1, 4))
        ask(asked, rng)
        asked.accept(tokens)
        for token in tokens:
            quiet.accept([token])
    assert asked.forced(()) == quiet.forced(())
    assert asked.is_complete == quiet.is_complete


def ask(constraint: GrammarConstraint, rng: random.Random) -> None:
    """Questions of all kinds, sensible and not."""
    drafted = draft(constraint, rng, rng.randint(0, 6))
    drafted = drafted[: rng.randint(0, len(drafted))]
    constraint.forced(drafted)
    constraint.permits(drafted, [rng.randrange(VOCABULARY.size) for _ in range(3)])
    constraint.permits((), [*drafted, END_IDS[1], 65])
    constraint.allowed([*drafted, END_IDS[0]])
    token = rng.randrange(VOCABULARY.size)
    if token not in allowed(constraint, drafted) and token not in END_IDS:
        with pytest.raises(ConstraintError):
            constraint.allowed([*drafted, token])


@given(grammars, modes, seeds)
def test_what_is_permitted_is_what_the_masks_allow(grammar: Grammar, mode: FastForward, seed: int) -> None:
    rng = random.Random(seed)
    one, other = start(with_mode(grammar, mode)), start(with_mode(grammar, mode))
    drafted = draft(one, rng, 8)
    split = rng.randint(0, len(drafted))
    wild = [*drafted[split:], rng.randrange(VOCABULARY.size), rng.randrange(VOCABULARY.size)]
    count, after = 0, drafted[:split]
    for token in wild:
        if token not in allowed(other, after):
            break
        count += 1
        if token in END_IDS:
            break
        after = [*after, token]
    assert one.permits(drafted[:split], wild) == count


@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_may_not_follow_is_refused_and_leaves_all_as_it_was(mode: FastForward) -> None:
    constraint = start(Grammar("choice", ANSWERS, fast_forward=mode))
    constraint.accept([ord("y")])
    before = allowed(constraint)
    for tokens in ([ord("e"), ord("x")], [CONTROL_IDS["<tool>"]], [END_IDS[0]], [ord("e"), END_IDS[0]]):
        with pytest.raises(ConstraintError):
            constraint.accept(tokens)
        assert allowed(constraint) == before
    constraint.accept(spell("es"))
    assert constraint.is_accepted and not constraint.is_complete


def test_the_masks_along_a_draft_are_worked_out_once() -> None:
    constraint = start(GRAMMARS[0])
    drafted = spell('{"name"')
    first = [constraint.allowed(drafted[:i]) for i in range(len(drafted) + 1)]
    constraint.permits(drafted, spell(": x"))
    again = [constraint.allowed(drafted[:i]) for i in reversed(range(len(drafted) + 1))]
    assert all(a is b for a, b in zip(first, reversed(again), strict=True))
    constraint.accept(drafted[:3])
    assert constraint.allowed(()) is first[3] and constraint.allowed(drafted[3:]) is first[-1]


# What is written


def is_record(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "kind", "tags"] and value["kind"] in ("amber", "ambient", "néon")


CHECKS: list[tuple[Grammar, Callable[[str], Any]]] = [
    *((grammar, is_record) for grammar in GRAMMARS[:2]),
    (GRAMMARS[2], lambda text: re.fullmatch(CODE, text)),
    (GRAMMARS[3], lambda text: text in json.loads(ANSWERS)),
    (GRAMMARS[4], lambda text: re.fullmatch(r"[0-9+()]+", text) and eval(re.sub(r"\d+", "1", text)) > 0),
    (GRAMMARS[5], lambda text: re.fullmatch("aname(ab|me){1,3}", text)),
]


@given(st.sampled_from(CHECKS), modes, seeds)
def test_a_random_walk_writes_what_the_grammar_asks_for(
    check: tuple[Grammar, Callable[[str], Any]], mode: FastForward, seed: int
) -> None:
    grammar, holds = check
    constraint = start(with_mode(grammar, mode))
    text = written(walk(constraint, random.Random(seed), most=120))
    if constraint.is_accepted:  # else it was cut: parentheses may nest for long
        assert holds(text.decode())
    else:
        assert grammar.kind == "gbnf"


@given(grammars, seeds)
def test_exact_forcing_never_touches_the_masks(grammar: Grammar, seed: int) -> None:
    exact, off = start(with_mode(grammar, "exact")), start(with_mode(grammar, "off"))

    def same(token: int) -> None:
        assert allowed(exact) == allowed(off)
        exact.forced(())
        off.accept([token])

    walk(exact, random.Random(seed), most=40, seen=same)


def test_every_choice_can_be_written_and_nothing_else() -> None:
    choice = start(Grammar("choice", ANSWERS))
    for text in json.loads(ANSWERS):
        assert takes(choice, text)
        assert not takes(choice, text + "x") and not takes(choice, text[:-1])


# Forced tokens


@given(grammars, modes, seeds)
def test_forced_tokens_are_permitted_and_change_nothing(
    grammar: Grammar, mode: FastForward, seed: int
) -> None:
    rng = random.Random(seed)
    constraint = start(with_mode(grammar, mode))
    for _ in range(5):
        drafted = draft(constraint, rng, rng.randint(0, 5))
        forced = constraint.forced(drafted)
        assert constraint.permits(drafted, forced) == len(forced)
        assert not set(forced) & set(END_IDS)
        if mode == "off":
            assert forced == ()
        if mode == "canonical":
            for i, token in enumerate(forced):
                assert allowed(constraint, [*drafted, *forced[:i]]) == [token]
        if drafted:
            constraint.accept(drafted[:1])


def test_forced_text_comes_in_the_tokens_that_the_model_is_used_to() -> None:
    constraint = start(GRAMMARS[0])
    # The quote that opens the value is forced, too, but a longer token may begin with it.
    assert constraint.forced(()) == (word('{"'), word("name"), word('": '))
    assert allowed(constraint) == [ord("{"), word('{"')]
    assert constraint.forced([ord("{"), ord('"'), ord("n")]) == (word("am"), ord("e"), word('": '))


def test_the_canonical_mask_refuses_other_splits() -> None:
    constraint = start(Grammar("choice", '["name"]', fast_forward="canonical"))
    assert allowed(constraint) == [word("name")]
    assert constraint.permits((), [word("na"), word("me")]) == 0
    with pytest.raises(ConstraintError):
        constraint.allowed([word("na")])
    with pytest.raises(ConstraintError):
        constraint.accept([word("na"), word("me")])
    constraint.accept([word("name")])
    assert constraint.is_complete


def test_a_tokenizer_that_puts_a_blank_first_forces_none() -> None:
    class BlankFirst(TableVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return super().tokenize(f" {text}", add_special=add_special, parse_special=parse_special)

    vocabulary = BlankFirst([*bytes_and('{"', " name", "name"), Token(b"<end>", control=True, end=True)])
    constraint = start(Grammar("choice", '["{\\"name"]', fast_forward="canonical"), Compiler(vocabulary))
    assert constraint.forced(()) == (256, 258)
    assert allowed(constraint) == [256]


# The end


@pytest.mark.parametrize("mode", MODES)
def test_every_end_token_is_allowed_exactly_where_the_text_is_whole(mode: FastForward) -> None:
    constraint = start(Grammar("choice", '["a", "ab!"]', fast_forward=mode))
    for text, whole in (("", False), ("a", True), ("ab", False), ("ab!", True)):
        ends = [token for token in allowed(constraint, spell(text)) if token in END_IDS]
        assert ends == (END_IDS if whole else [])
    constraint.accept(spell("a"))
    assert constraint.is_accepted and not constraint.is_complete
    constraint.accept(spell("b!"))
    assert constraint.is_accepted and constraint.is_complete


@pytest.mark.parametrize("end", END_IDS)
@pytest.mark.parametrize("mode", MODES)
def test_behind_an_end_token_everything_is_allowed_and_nothing_permitted(mode: FastForward, end: int) -> None:
    constraint = start(Grammar("choice", '["a", "ab!"]', fast_forward=mode))
    drafted = [*spell("a"), end]
    assert constraint.allowed(drafted) is None and constraint.allowed([*drafted, 7, 8]) is None
    assert constraint.permits((), [*drafted, *spell("b")]) == 2
    assert constraint.permits(drafted, spell("b")) == 0 and constraint.forced(drafted) == ()
    assert ord("b") in allowed(constraint, spell("a"))  # the end was only asked about
    constraint.accept(drafted)
    assert constraint.is_complete and constraint.is_accepted
    assert constraint.allowed(()) is None and constraint.forced(()) == ()
    with pytest.raises(ConstraintError):
        constraint.accept(spell("b"))


def test_a_draft_that_ran_over_the_end_can_be_taken_back() -> None:
    constraint = start(GRAMMARS[0])
    text = '{"name": "a", "kind": "amber", "tags": []}'
    whole = [*VOCABULARY.tokenize(text), END_IDS[0]]
    assert constraint.permits((), [*whole, *whole]) == len(whole)
    before = masks(constraint, whole[:-1])
    constraint.allowed(whole)
    assert masks(constraint, whole[:-1]) == before
    constraint.accept(whole[:-1])
    assert constraint.is_complete and allowed(constraint) == END_IDS


def test_control_tokens_are_no_text() -> None:
    constraint = start(Grammar("json_schema", '{"type": "string"}'))
    inside = spell('"a')
    assert not set(CONTROL_IDS.values()) & set(allowed(constraint, inside))
    assert word("</think>") in allowed(constraint, inside)  # the word of the same spelling is one
    assert takes(constraint, '"<end></think>"')


# What cannot go on


def test_a_dead_end_is_an_error_and_can_be_avoided() -> None:
    vocabulary = FakeVocabulary("ab")
    end = vocabulary.size - 1
    constraint = start(Grammar("choice", '["aac", "ab"]'), Compiler(vocabulary))
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no token"):
            constraint.allowed([0, 0])
        assert allowed(constraint, [0]) == [0, 1] and allowed(constraint, [0, 1]) == [end]
    constraint.accept([0])
    with pytest.raises(ConstraintError, match="no token"):
        constraint.allowed([0])
    assert allowed(constraint) == [0, 1] and allowed(constraint, [1]) == [end]
    constraint.accept([0])
    with pytest.raises(ConstraintError, match="no token"):
        constraint.allowed(())


def test_a_limit_is_an_error_that_says_so() -> None:
    explosive = "(((((a{1,50}){1,50}){1,50}){1,50}){1,50}){1,50}b"
    constraint = start(Grammar("regex", explosive))
    with pytest.raises(ConstraintError, match="could not be worked out"):
        for _ in range(100):
            constraint.allowed(())
            constraint.accept(spell("a"))


def test_a_vocabulary_that_can_write_nothing_of_it_is_refused() -> None:
    with pytest.raises(GrammarError, match="nothing"):
        Compiler(FakeVocabulary("ab")).compile(Grammar("choice", '["é"]'))


def test_a_vocabulary_without_an_end_is_refused() -> None:
    with pytest.raises(SettingError, match="end"):
        Compiler(TableVocabulary(bytes_and())).compile(Grammar("json"))


# Compiling


def test_a_grammar_is_compiled_once_and_its_constraints_are_apart() -> None:
    compiler = Compiler(VOCABULARY)
    compiled = compiler.compile(GRAMMARS[3])
    assert compiler.compile(with_mode(GRAMMARS[3], "exact")) is compiled
    assert compiler.compile(with_mode(GRAMMARS[3], "off")) is not compiled
    one, other = compiled.start(), compiled.start()
    one.accept(spell("ye"))
    assert allowed(other) == allowed(compiled.start()) != allowed(one)


def test_a_vocabulary_is_let_go() -> None:
    vocabulary = TableVocabulary([*bytes_and("ab"), Token(b"<end>", control=True, end=True)])
    alive = weakref.ref(vocabulary)
    constraint = Compiler(vocabulary).compile(Grammar("choice", '["ab"]')).start()
    assert constraint.forced(()) == (256,)
    del vocabulary, constraint
    gc.collect()
    assert alive() is None


def test_threads_may_share_a_compiler() -> None:
    compiler, failures = Compiler(VOCABULARY), []

    def work(seed: int) -> None:
        try:
            for grammar in GRAMMARS[:4]:
                walk(start(grammar, compiler), random.Random(seed), most=30)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_limit_is_that_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.constraints.compiler._MAX_LEXER_STATES", 60)
    vocabulary = FakeVocabulary("abc")
    compiler, grammar = Compiler(vocabulary), Grammar("regex", "(a|b)*a(a|b){6}c?")
    reached = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        constraint = compiler.compile(grammar).start()
        with pytest.raises(ConstraintError) as caught:
            for number in range(200):
                token = int(rng.integers(2))
                assert constraint.permits((), (token,)) in (0, 1), "it never raises"
                constraint.forced(())
                constraint.accept((token,))
                constraint.allowed(())
                reached.append((seed, number))
        assert "may not follow" not in str(caught.value)
    last = [max(number for s, number in reached if s == seed) for seed in range(4)]
    assert min(last) > 15, f"each request has about as much room as the first: {last}"


# Behind a trigger: free text, the trigger, and what may follow it


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
