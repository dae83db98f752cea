"""What limits a request. Budgets of reasoning: the closing is forced where they are used up, whatever is
drafted. Forced text: it is drafted in the tokens that the model is known to prefer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from examples import examples
from outrider import Session
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.data import Grammar, Request, Row, Thought
from outrider.core.params import SamplingParams
from outrider.drafters.lookup import SuffixDrafter
from outrider.engine import Engine
from outrider.engine.limits import PreferredConstraint, PreferredTokenization, ThoughtLimit
from outrider.policy.fixed import FixedPolicy
from vocabularies import TableVocabulary, Token, bytes_and

GREEDY = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0)


MARKS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")


class Marked(TableVocabulary):
    """Bytes, an end token, and control tokens for the markers of two formats."""

    def __init__(self, *, controls: bool = True) -> None:
        marks = [Token(mark.encode(), control=True) for mark in MARKS if controls]
        super().__init__([*bytes_and(), Token(b"<eos>", control=True, end=True), *marks])

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.spelling, tokens)).decode(errors="replace")


THINK = Thought("<think>", "</think>", "</think>")
CHANNELS = Thought(
    "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant", reopens="<|channel|>"
)


def saying(vocabulary: Marked, text: str) -> Any:
    """A model that says a text, and after a closing that was forced goes on with what follows its own."""
    script = [*vocabulary.tokenize(text, parse_special=True), 256]

    def next_logits(tokens: Sequence[int]) -> Any:
        row = np.zeros(vocabulary.size, dtype=np.float32)
        said = list(tokens[1:])
        while said and script[: len(said)] != said:
            place = next(i for i in range(len(said)) if script[: i + 1] != said[: i + 1])
            closing = len(said) - place
            rest = said[place:]
            found = next((i for i in range(place, len(script)) if script[i : i + closing] == rest), None)
            said = script[: found + closing] if found is not None else said[:place]
        row[script[min(len(said), len(script) - 1)]] = 9.0
        return row

    return next_logits


def session_of(vocabulary: Marked, next_logits: Any, *, drafts: bool = True) -> Session:
    options: dict[str, Any] = {"context_length": 512, "max_batch_tokens": 512, "max_rows": 512}
    model = FakeModel(cast(FakeVocabulary, vocabulary), next_logits, max_sequences=2, **options)
    return Session(model, [SuffixDrafter()] if drafts else [])


def answer(vocabulary: Marked, text: str, thought: Thought, grammar: Grammar | None = None) -> str:
    with session_of(vocabulary, saying(vocabulary, text)) as session:
        request = Request((1,), GREEDY, max_tokens=200, thought=thought, grammar=grammar)
        completion = session.engine.generate(request)
    return vocabulary.text(completion.tokens).removesuffix("<eos>")


@pytest.mark.parametrize("controls", [True, False])
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, "<think>one two three</think>four"),
        (100, "<think>one two three</think>four"),
        (13, "<think>one two three</think>four"),
        (7, "<think>one two</think>four"),
        (1, "<think>o</think>four"),
        (0, "<think></think>four"),
    ],
)
def test_the_closing_is_forced_when_the_budget_is_used_up(
    budget: int | None, expected: str, controls: bool
) -> None:
    vocabulary = Marked(controls=controls)
    text = "<think>one two three</think>four"
    assert answer(vocabulary, text, replace(THINK, budget=budget)) == expected
    opened = replace(THINK, budget=budget, opened=True)
    assert answer(vocabulary, text.removeprefix("<think>"), opened) == expected.removeprefix("<think>")


def test_a_message_may_come_before_the_closing() -> None:
    vocabulary = Marked()
    thought = replace(THINK, budget=3, closing=" Enough.</think>")
    text = "<think>one two Enough.</think>four"
    assert answer(vocabulary, text, thought) == "<think>one Enough.</think>four"


def test_no_character_is_cut_and_a_marker_that_has_begun_is_completed() -> None:
    vocabulary = Marked()
    assert answer(vocabulary, "<think>aé😀b</think>c", replace(THINK, budget=4)) == "<think>aé😀</think>c"
    spelled = Marked(controls=False)
    text = "<think>ab</think>c"
    assert answer(spelled, text, replace(THINK, budget=4)) == text


def test_only_reasoning_counts() -> None:
    vocabulary = Marked()
    for text in ("No thoughts, <think>as text</think> only.", " \n<think>a</think>" + "b" * 50):
        assert answer(vocabulary, text, replace(THINK, budget=1)) == text


def test_channels_are_closed_and_do_not_reopen() -> None:
    vocabulary = Marked()
    head = "<|channel|>analysis<|message|>"
    text = f"{head}one two<|end|><|start|>assistant<|channel|>final<|message|>four"
    assert answer(vocabulary, text, replace(CHANNELS, budget=None)) == text
    cut = f"{head}one<|end|><|start|>assistant<|channel|>final<|message|>four"
    assert answer(vocabulary, text, replace(CHANNELS, budget=3)) == cut
    # Two messages of reasoning share the budget, and no third begins.
    limit = ThoughtLimit(replace(CHANNELS, budget=3), vocabulary)
    said = f"{head}on<|end|><|start|>assistant{head}e"
    limit.accept(vocabulary.tokenize(said, parse_special=True))
    assert vocabulary.text(limit.forced(())) == "<|end|><|start|>assistant"
    limit.accept([*limit.forced(()), *vocabulary.tokenize("<|channel|>", parse_special=True)])
    mask = limit.allowed(())
    assert mask is not None and not mask[ord("a")] and mask[ord("f")] and mask[256]


def test_a_grammar_holds_beside_it() -> None:
    vocabulary = Marked()
    grammar = Grammar("regex", "[0-9]{2}", after="</think>")
    found = answer(vocabulary, "<think>one two three</think>42", replace(THINK, budget=3), grammar)
    assert found == "<think>one</think>42"
    # Where the grammar does not allow the closing, it is not forced.
    never = Grammar("regex", "<think>[a-z ]*")
    spelled = Marked(controls=False)
    text = "<think>one two"
    assert answer(spelled, text, replace(THINK, budget=3), never) == text


@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(0, 12),
    opened=st.booleans(),
    controls=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_text_is_that_of_plain_decoding(
    seed: int, budget: int, opened: bool, controls: bool, temperature: float
) -> None:
    """Of random models, whatever is drafted; and no more reasoning than the budget, a character aside."""
    vocabulary = Marked(controls=controls)
    flat = random_logits(vocabulary.size, seed=seed, order=1, scale=1.0)
    marks = vocabulary.tokenize("<think></think>ab", parse_special=True)

    def next_logits(tokens: Sequence[int]) -> Any:
        row = flat(tokens).copy()
        row[marks] += 4.0  # few tokens are likely, so that much repeats and is drafted
        return row

    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=seed)
    texts = []
    for drafts in (True, False):
        with session_of(vocabulary, next_logits, drafts=drafts) as session:
            thought = replace(THINK, budget=budget, opened=opened)
            request = Request((1, *marks), sampling, max_tokens=40, thought=thought, speculate=drafts)
            completion = session.engine.generate(request)
            texts.append(completion.tokens)
    if temperature == 0:
        assert texts[0] == texts[1]
    said = list(texts[0])
    closer = vocabulary.tokenize("</think>", parse_special=True)
    ends = [i for i in range(len(said)) if said[i : i + len(closer)] == closer]
    if opened and ends:
        assert ends[0] <= budget + len(closer) + 2  # the last character, a marker that has begun


def test_the_closing_is_drafted() -> None:
    """As forced text: one target call for all its tokens, and what follows."""
    vocabulary = Marked(controls=False)
    text = "<think>" + "".join(map(chr, range(97, 117))) + "</think>four"
    with session_of(vocabulary, saying(vocabulary, text), drafts=False) as session:
        request = Request((1,), GREEDY, max_tokens=200, thought=replace(THINK, budget=5))
        completion = session.engine.generate(request)
    assert vocabulary.text(completion.tokens) == "<think>abcde</think>four<eos>"
    steps = [record for record in completion.records if record.kind == "decode"]
    closing = next(record for record in steps if "grammar" in record.draft.sources)
    assert closing.num_accepted == len("</think>") == len(closing.draft)
    assert all(record.constraint_s == 0 for record in steps[-3:]), "what is over costs nothing"


# Forced text in the tokens that a model prefers

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
A, B, C, AB, BC, CAB = range(6)
TEXT = "abcabcabcabc"
REQUEST = Request((0,), GREEDY, 30, grammar=Grammar("choice"))


def prefers(*tokens: int) -> NextLogits:
    """A model that likes these tokens best, whatever the text."""

    def logits(_text: object) -> Row:
        row = np.zeros(WORDS.size, dtype=np.float32)
        row[list(tokens)] = 9
        return row

    return logits


def preferring(*tokens: int, **settings: bool) -> Engine:
    target = FakeModel(WORDS, prefers(*tokens))
    return Engine(target, [], FixedPolicy(), constrain=lambda _: OneOf(WORDS, [TEXT], **settings))


def test_a_habit_is_learned_within_a_text_and_kept_for_the_next() -> None:
    small = preferring(A, B, C)
    first, second = small.generate(REQUEST), small.generate(REQUEST)
    assert first.tokens == second.tokens == (A, B, C) * 4
    calls = [sum(r.kind == "decode" for r in run.records) for run in (first, second)]
    assert calls[1] == 1 < calls[0] < 8
    plain = small.generate(replace(REQUEST, speculate=False))
    assert plain.tokens == first.tokens


def test_the_usual_tokens_stay_where_the_model_takes_them() -> None:
    usual = preferring(AB, CAB)
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
    spelling.note(BC, B)
    assert spelling.preferred(BC) == B
    spelling.forget()
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


def test_no_more_of_a_forced_text_is_worked_out_than_a_call_can_check() -> None:
    spelling = PreferredTokenization()
    spelling.note(CAB, C)
    counting = Counting(WORDS, [TEXT * 8])
    whole = PreferredConstraint(counting, spelling).forced(())
    first = Counting(WORDS, [TEXT * 8])
    assert PreferredConstraint(first, spelling, longest=6).forced(()) == whole[:6] and len(whole) > 30
    assert first.num_forced <= 6 < counting.num_forced
