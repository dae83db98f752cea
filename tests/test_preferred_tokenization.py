"""Forced text is drafted in the tokens that the model is known to prefer."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from outrider.backends.fake import FakeModel, NextLogits
from outrider.core.data import Grammar, Request, Row
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.engine.limits import PreferredConstraint, PreferredTokenization
from outrider.policy.fixed import FixedPolicy

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
A, B, C, AB, BC, CAB = range(6)
TEXT = "abcabcabcabc"
REQUEST = Request((0,), SamplingParams(temperature=0), 30, grammar=Grammar("choice"))


def prefers(*tokens: int) -> NextLogits:
    """A model that likes these tokens best, whatever the text."""

    def logits(_text: object) -> Row:
        row = np.zeros(WORDS.size, dtype=np.float32)
        row[list(tokens)] = 9
        return row

    return logits


def engine(*tokens: int, **settings: bool) -> Engine:
    target = FakeModel(WORDS, prefers(*tokens))
    return Engine(target, [], FixedPolicy(), constrain=lambda _: OneOf(WORDS, [TEXT], **settings))


def test_a_habit_is_learned_within_a_text_and_kept_for_the_next() -> None:
    small = engine(A, B, C)
    first, second = small.generate(REQUEST), small.generate(REQUEST)
    assert first.tokens == second.tokens == (A, B, C) * 4
    calls = [sum(r.kind == "decode" for r in run.records) for run in (first, second)]
    assert calls[1] == 1 < calls[0] < 8
    plain = small.generate(replace(REQUEST, speculate=False))
    assert plain.tokens == first.tokens


def test_the_usual_tokens_stay_where_the_model_takes_them() -> None:
    usual = engine(AB, CAB)
    completion = usual.generate(REQUEST)
    assert completion.tokens == (AB, CAB, CAB, CAB, C)
    assert sum(r.kind == "decode" for r in completion.records) == 1


def test_habits_change() -> None:
    spelling = PreferredTokenization()
    for _ in range(100):
        spelling.note(AB, A)
    assert spelling.preferred(AB) == A
    for _ in range(20):
        spelling.note(AB, AB)
    assert spelling.preferred(AB) == AB
    assert spelling.preferred(BC) == BC


@given(
    notes=st.lists(st.tuples(st.sampled_from(range(6)), st.sampled_from(range(6)))),
    drafted=st.sampled_from([(), (A,), (AB,), (A, B)]),
)
def test_whatever_was_learned_forced_tokens_spell_the_forced_text(
    notes: list[tuple[int, int]], drafted: tuple[int, ...]
) -> None:
    spelling, inner = PreferredTokenization(), OneOf(WORDS, [TEXT])
    for usual, chosen in notes:
        spelling.note(usual, chosen)
    tokens = PreferredConstraint(inner, spelling).forced(drafted)
    assert WORDS.text((*drafted, *tokens)) == TEXT
    assert inner.permits(drafted, tokens) == len(tokens) and not inner.final


def test_nothing_is_forced_where_the_constraint_forces_nothing() -> None:
    assert PreferredConstraint(OneOf(WORDS, [TEXT], forcing=False), PreferredTokenization()).forced(()) == ()
    assert PreferredConstraint(OneOf(WORDS, ["ab", "cab"]), PreferredTokenization()).forced(()) == ()


class Counting(OneOf):
    """Counts how often it is asked what is forced."""

    num_forced = 0

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        self.num_forced += 1
        return super().forced(drafted)


def test_a_long_forced_text_is_not_worked_out_anew_at_every_token() -> None:
    counting = Counting(WORDS, [TEXT * 8])
    spelled = PreferredConstraint(counting, PreferredTokenization())
    usual = spelled.forced(())
    assert len(usual) > 20
    counting.num_forced = 0
    spelled.accept(usual)
    assert counting.num_forced == 1 and spelled.is_complete


def test_what_was_learned_can_be_forgotten() -> None:
    spelling = PreferredTokenization()
    spelling.note(AB, A)
    assert spelling.preferred(AB) == A
    spelling.forget()
    assert spelling.preferred(AB) == AB


def test_no_more_of_a_forced_text_is_worked_out_than_a_call_can_check() -> None:
    spelling = PreferredTokenization()
    spelling.note(CAB, C)
    counting = Counting(WORDS, [TEXT * 8])
    whole = PreferredConstraint(counting, spelling).forced(())
    first = Counting(WORDS, [TEXT * 8])
    assert PreferredConstraint(first, spelling, longest=6).forced(()) == whole[:6] and len(whole) > 30
    assert first.num_forced <= 6 < counting.num_forced
