"""The engine on exact little models: whatever is drafted, the output is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import (
    GREEDY,
    VOCABULARY,
    CheckedEngine,
    ScriptedDrafter,
    greedy_continuation,
    nothing,
    oracle,
    plain,
    random_guess,
    result,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits, scripted_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Logits, Request, SamplingParams, Span
from outrider.core.errors import BackendError, InputError, PromptError, RewindUnsupported
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.policy import FixedPolicy
from outrider.vocab import compare as compare_vocabularies

LANGUAGE = random_logits(VOCABULARY.size, seed=11, order=3)
END = VOCABULARY.size - 1
PROMPT = (0, 1, 2, 0, 1)


def language_model(**options: Any) -> FakeModel:
    return FakeModel(VOCABULARY, LANGUAGE, **options)


def other_vocabulary_drafter(*, sampled: bool = False) -> ModelDrafter:
    """A draft whose ids are another order, which lacks a blank and has tokens of its own."""
    vocabulary = FakeVocabulary("xdcyba")
    logits = random_logits(vocabulary.size, seed=5, order=2)
    alignment = compare_vocabularies(VOCABULARY, vocabulary)
    assert not alignment.identical
    return ModelDrafter(FakeModel(vocabulary, logits, name="other"), alignment, sampled=sampled)


def model_drafter(logits: NextLogits, *, sampled: bool = False, **options: Any) -> ModelDrafter:
    return ModelDrafter(FakeModel(VOCABULARY, logits, **options), same_vocabulary(), sampled=sampled)


DRAFTERS: dict[str, Callable[[], list[Drafter]]] = {
    "itself": lambda: [model_drafter(LANGUAGE)],
    "another model": lambda: [model_drafter(random_logits(VOCABULARY.size, seed=12))],
    "another vocabulary": lambda: [other_vocabulary_drafter()],
    "small draft context": lambda: [model_drafter(LANGUAGE, context_length=9)],
    "lookup": lambda: [SuffixDrafter(min_match=1)],
    "lookup, then a model": lambda: [SuffixDrafter(min_match=1), model_drafter(LANGUAGE)],
    "always right": lambda: [ScriptedDrafter(oracle(LANGUAGE))],
    "always wrong": lambda: [ScriptedDrafter(oracle(LANGUAGE, 0))],
    "wrong from the third": lambda: [ScriptedDrafter(oracle(LANGUAGE, 2))],
    "random": lambda: [ScriptedDrafter(random_guess(3))],
    "empty": lambda: [ScriptedDrafter(nothing)],
}

REQUESTS = {
    "an end token": Request(PROMPT, GREEDY),
    "the limit": Request(PROMPT, GREEDY, max_tokens=13, ignore_end=True),
    "one token": Request(PROMPT, GREEDY, max_tokens=1, ignore_end=True),
    "one prompt token": Request((3,), GREEDY, max_tokens=9, ignore_end=True),
    "the context": Request(PROMPT, GREEDY, ignore_end=True),
    "a long prompt": Request(PROMPT * 7, GREEDY, ignore_end=True),
}


@pytest.mark.parametrize("drafters", DRAFTERS)
@pytest.mark.parametrize("case", REQUESTS)
def test_greedy_speculation_equals_plain_decoding(drafters: str, case: str) -> None:
    options = {"context_length": 40, "max_batch_tokens": 16}
    expected = plain(language_model(**options), REQUESTS[case])
    for draft_max in range(9):
        policy = FixedPolicy(draft_max=draft_max, p_min=0, hand_over=0)
        engine = CheckedEngine(language_model(**options), DRAFTERS[drafters](), policy)
        [outcome] = engine.run(REQUESTS[case])
        assert result(outcome) == expected
        if draft_max == 0:
            assert all(not record.draft for record in outcome.records)


def test_plain_decoding_is_what_the_model_says() -> None:
    tokens, text, finish_reason = plain(language_model(context_length=60), REQUESTS["the limit"])
    assert list(tokens) == greedy_continuation(LANGUAGE, PROMPT, 13)
    assert text == "".join("abcd "[t] for t in tokens if t != END)
    assert finish_reason == "length"


def test_the_context_is_used_to_its_end() -> None:
    tokens, _, finish_reason = plain(language_model(context_length=40), REQUESTS["the context"])
    assert (len(PROMPT) + len(tokens), finish_reason) == (40, "context")


@given(
    seed=st.integers(0, 10**6),
    stops=st.lists(st.text("abcd ", min_size=1, max_size=4), max_size=2),
    draft_max=st.integers(1, 8),
    num_right=st.integers(0, 8),
    max_tokens=st.integers(1, 24),
)
def test_a_stop_or_an_end_anywhere_in_a_draft(
    seed: int, stops: list[str], draft_max: int, num_right: int, max_tokens: int
) -> None:
    logits = random_logits(VOCABULARY.size, seed=seed, order=4)
    request = Request(PROMPT, GREEDY, max_tokens=max_tokens, stop=tuple(stops))
    policy = FixedPolicy(draft_max=draft_max, p_min=0)
    engine = CheckedEngine(
        FakeModel(VOCABULARY, logits), [ScriptedDrafter(oracle(logits, num_right))], policy
    )
    [outcome] = engine.run(request)
    assert result(outcome) == plain(FakeModel(VOCABULARY, logits), request)
    assert all(stop not in outcome.text for stop in stops)
    assert END not in outcome.tokens[:-1] and len(outcome.tokens) <= max_tokens
    assert outcome.tokens == greedy_continuation(logits, PROMPT, len(outcome.tokens))


def test_tokens_behind_a_stop_are_not_counted_as_accepted() -> None:
    script = scripted_logits(VOCABULARY, "abcd ")
    engine = CheckedEngine(FakeModel(VOCABULARY, script), [ScriptedDrafter(oracle(script))])
    [outcome] = engine.run(Request(PROMPT, GREEDY, stop=("cd",)))
    [record] = [record for record in outcome.records if record.kind == "decode"]
    assert (len(record.draft), record.num_accepted, len(record.tokens)) == (8, 4, 4)
    assert (outcome.text, outcome.finish_reason) == ("ab", "stop")


def test_an_accepted_token_is_credited_to_its_drafter() -> None:
    script = scripted_logits(VOCABULARY, "abcd ")
    drafters = [ScriptedDrafter(oracle(script, 2))]
    engine = Engine(FakeModel(VOCABULARY, script), drafters, FixedPolicy(draft_max=3))
    updates = list(engine.stream(Request(PROMPT, GREEDY, max_tokens=9, ignore_end=True)))
    sources = [piece.source for piece in updates[-1].pieces]
    assert sources == ["scripted", "scripted", "target"]


# Several sequences


@given(seed=st.integers(0, 10**6), max_batch_tokens=st.sampled_from([4, 5, 7, 16, 64]))
def test_sequences_side_by_side_say_what_each_says_alone(seed: int, max_batch_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        Request(
            tuple(int(t) for t in rng.integers(0, END, rng.integers(1, 30))),
            GREEDY,
            max_tokens=int(rng.integers(1, 25)),
            stop=("ab",) if rng.random() < 0.3 else (),
            ignore_end=bool(rng.random() < 0.5),
        )
        for _ in range(4)
    ]
    drafters: list[Drafter] = [
        SuffixDrafter(min_match=2),
        model_drafter(random_logits(VOCABULARY.size, seed=12), max_batch_tokens=max_batch_tokens),
    ]
    engine = CheckedEngine(language_model(max_batch_tokens=max_batch_tokens), drafters)
    first = engine.submit(requests[0])
    for _ in range(3):
        if engine.outcomes[first].finish_reason is None:
            engine.step()
    outcomes = [engine.outcomes[first], *engine.run(*requests[1:])]
    for request, outcome in zip(requests, outcomes, strict=True):
        assert result(outcome) == plain(language_model(), request)


def test_a_long_prompt_is_read_in_chunks_while_others_go_on() -> None:
    options = {"context_length": 1000, "max_batch_tokens": 1000}
    engine = CheckedEngine(language_model(**options))
    short = engine.submit(Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True))
    engine.step()
    prompt = PROMPT * 120
    long = engine.submit(Request(prompt, GREEDY, max_tokens=2, ignore_end=True))
    while engine.step():
        pass
    prefill = [r for r in engine.outcomes[long].records if r.kind == "prefill"]
    assert [r.num_evaluated for r in prefill] == [PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, 599 - 512]
    assert engine.outcomes[short].records[-1].num_sequences == 2 or len(prefill) == 3
    assert tuple(engine.outcomes[long].tokens) == tuple(greedy_continuation(LANGUAGE, prompt, 2))


def test_more_requests_than_sequences_are_refused_and_the_others_go_on() -> None:
    engine = CheckedEngine(language_model(max_sequences=2))
    requests = [Request((i,), GREEDY, max_tokens=4, ignore_end=True) for i in range(3)]
    ids = [engine.submit(request) for request in requests[:2]]
    with pytest.raises(InputError, match="all 2 sequences are in use"):
        engine.engine.submit(requests[2])
    while engine.step():
        pass
    assert all(engine.outcomes[i].finish_reason == "length" for i in ids)
    assert result(engine.run(requests[2])[0]) == plain(language_model(), requests[2])


def test_streams_that_take_turns_each_see_all_their_text() -> None:
    engine = Engine(language_model(), [ScriptedDrafter(oracle(LANGUAGE, 1))])
    requests = [Request((i, 0), GREEDY, max_tokens=12, ignore_end=True) for i in range(3)]
    streams = [engine.stream(request) for request in requests]
    seen = [""] * 3
    texts: dict[int, str] = {}
    while len(texts) < 3:
        for i, stream in enumerate(streams):
            try:
                seen[i] += next(stream).text
            except StopIteration as end:
                texts.setdefault(i, end.value.text if end.value else "")
    assert seen == [texts[i] for i in range(3)] == [plain(language_model(), r)[1] for r in requests]


# Cancelling, reusing, forgetting


@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_can_be_cancelled_after_any_step(num_steps: int) -> None:
    engine = Engine(language_model(max_sequences=1), [model_drafter(LANGUAGE)], FixedPolicy(draft_max=2))
    request = Request(PROMPT, GREEDY, max_tokens=30, ignore_end=True)
    request_id = engine.submit(request)
    tokens: list[int] = []
    for _ in range(num_steps):
        tokens += engine.step()[0].record.tokens
    engine.cancel(request_id)
    assert engine.step() == []
    assert tokens == greedy_continuation(LANGUAGE, PROMPT, len(tokens))
    again = engine.generate(request)
    assert again.tokens == plain(language_model(), request)[0]
    assert again.reused_tokens == (len(PROMPT) - 1 if num_steps else 0)


def test_closing_a_stream_frees_its_sequence() -> None:
    engine = Engine(language_model(max_sequences=1))
    request = Request(PROMPT, GREEDY, max_tokens=30, ignore_end=True)
    stream = engine.stream(request)
    next(stream)
    stream.close()
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


def test_a_cancelled_stream_ends_with_what_was_made() -> None:
    engine = Engine(language_model())
    stream = engine.stream(Request(PROMPT, GREEDY, max_tokens=30, stop=("zz", "abcd abcd"), ignore_end=True))
    seen = next(stream).record.tokens + next(stream).record.tokens
    engine.cancel(0)
    with pytest.raises(StopIteration) as end:
        next(stream)
    completion: Completion = end.value.value
    assert (completion.finish_reason, completion.tokens) == ("cancelled", seen)
    assert completion.text == "".join("abcd "[t] for t in seen if t != END)


@given(
    seed=st.integers(0, 10**6), num_turns=st.integers(2, 4), keep=st.integers(0, 40), speculate=st.booleans()
)
def test_what_an_earlier_request_left_is_reused_and_right(
    seed: int, num_turns: int, keep: int, speculate: bool
) -> None:
    rng = np.random.default_rng(seed)
    target = language_model(max_sequences=1)
    engine = Engine(target, [model_drafter(random_logits(VOCABULARY.size, seed=12)), SuffixDrafter()])
    prompt: tuple[int, ...] = PROMPT
    for turn in range(num_turns):
        request = Request(prompt, GREEDY, max_tokens=int(rng.integers(1, 12)), ignore_end=True)
        completion = engine.generate(replace(request, speculate=speculate or turn % 2 == 0))
        assert completion.tokens == plain(language_model(), request)[0]
        stored = target.stored(0)
        prompt = (*(prompt + completion.tokens)[: max(1, keep)], *(int(t) for t in rng.integers(0, END, 3)))
        common = next((i for i, (a, b) in enumerate(zip(stored, prompt, strict=False)) if a != b), None)
        common = min(len(stored), len(prompt)) if common is None else common
        follow = engine.generate(Request(prompt, GREEDY, max_tokens=1))
        assert follow.reused_tokens == min(common, len(prompt) - 1)


def test_a_prompt_without_a_past_takes_the_slot_that_holds_least() -> None:
    engine = Engine(language_model())
    talk = Request(PROMPT * 4, GREEDY, max_tokens=6, ignore_end=True)
    engine.generate(talk)
    engine.generate(Request((3, 3, 3), GREEDY, max_tokens=3))
    assert engine.generate(talk).reused_tokens == len(PROMPT) * 4 - 1


def test_reset_forgets_finished_requests_and_leaves_running_ones_alone() -> None:
    target = language_model(max_sequences=2)
    engine = CheckedEngine(target, [model_drafter(LANGUAGE), SuffixDrafter()])
    engine.run(Request((2, 2), GREEDY, max_tokens=3, ignore_end=True))
    request = Request(PROMPT, GREEDY, max_tokens=40, ignore_end=True)
    running = engine.submit(request)
    engine.step()
    engine.step()
    engine.engine.reset()
    while engine.step():
        pass
    assert result(engine.outcomes[running]) == plain(language_model(), request)
    engine.engine.reset()
    assert target.length(0) == target.length(1) == 0
    assert engine.engine.generate(request).reused_tokens == 0


@pytest.mark.parametrize("prompt", [(0, VOCABULARY.size), (-1,), (0,) * 40])
def test_a_prompt_that_cannot_be_evaluated_is_refused(prompt: tuple[int, ...]) -> None:
    engine = Engine(language_model(context_length=40, max_sequences=1), [other_vocabulary_drafter()])
    with pytest.raises(PromptError):
        engine.submit(Request(prompt))
    assert engine.generate(REQUESTS["the limit"]).finish_reason == "length"


# Models that cannot rewind, and calls that fail


def recurrent_model() -> FakeModel:
    return FakeModel(VOCABULARY, LANGUAGE, rewind="none", max_sequences=1)


def test_a_target_that_cannot_rewind_decodes_plainly() -> None:
    engine = Engine(recurrent_model(), [ScriptedDrafter(oracle(LANGUAGE))])
    assert ["decoding plainly" in notice for notice in engine.notices] == [True]
    request = Request(PROMPT, GREEDY, max_tokens=9, ignore_end=True)
    first = engine.generate(request)
    assert first.tokens == plain(language_model(), request)[0]
    assert sum(record.kind == "decode" for record in first.records) == 9
    following = Request((*PROMPT, *first.tokens, 2), GREEDY, max_tokens=9, ignore_end=True)
    second = engine.generate(following)
    assert second.tokens == plain(language_model(), following)[0]
    assert second.reused_tokens == len(PROMPT) + 8
    other = Request((*PROMPT, 3, 3), GREEDY, max_tokens=9, ignore_end=True)
    third = engine.generate(other)
    assert (third.tokens, third.reused_tokens) == (plain(language_model(), other)[0], 0)


class ForgetfulModel(FakeModel):
    """A sliding window: it can take back no more than `reach` tokens."""

    reach = 3

    def truncate(self, sequence: int, length: int) -> None:
        if 0 < length < self.length(sequence) - self.reach:
            raise RewindUnsupported(self.name, "the window no longer holds it")
        super().truncate(sequence, length)


def test_a_window_that_cannot_be_rewound_far_enough_is_evaluated_anew() -> None:
    target = ForgetfulModel(VOCABULARY, LANGUAGE, rewind="window")
    request = Request(PROMPT, GREEDY, max_tokens=20, ignore_end=True)
    completion = Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 1))]).generate(request)
    assert completion.tokens == plain(language_model(), request)[0]
    assert any(record.kind == "prefill" for record in completion.records[2:])


class FailingModel(FakeModel):
    """Fails at chosen calls: before or after storing the tokens, as an interrupt may come."""

    def __init__(self, logits: NextLogits, error: BaseException, *, stored: bool, **options: Any) -> None:
        super().__init__(VOCABULARY, logits, **options)
        self.fail_at: int | None = None
        self._error = error
        self._after = stored

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        failing = len(self.calls) + 1 == self.fail_at
        if failing and not self._after:
            self.calls.append(tuple(spans))
            raise self._error
        rows = super().decode(spans)
        if failing:
            raise self._error
        return rows


ERRORS = [BackendError("model", "it failed"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=["error", "interrupt"])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("failing", ["target", "draft"])
@pytest.mark.parametrize("call", range(1, 10))
def test_a_call_that_fails_costs_nothing_but_itself(
    failing: str, stored: bool, error: BaseException, call: int
) -> None:
    drafts = random_logits(VOCABULARY.size, seed=12)
    target = FailingModel(LANGUAGE, error, stored=stored, max_batch_tokens=16)
    draft = FailingModel(drafts, error, stored=stored, max_batch_tokens=16)
    (target if failing == "target" else draft).fail_at = call
    engine = CheckedEngine(target, [SuffixDrafter(), ModelDrafter(draft, same_vocabulary())])
    requests = [
        Request(PROMPT * 3, GREEDY, max_tokens=14, ignore_end=True),
        Request((2, 3), GREEDY, max_tokens=14, ignore_end=True),
    ]
    ids = [engine.submit(request) for request in requests]
    num_failures = 0
    for _ in range(60):
        try:
            if not engine.step():
                break
        except (BackendError, KeyboardInterrupt):
            num_failures += 1
            for i in ids:
                engine.check(engine.outcomes[i], decoding=False)
    assert num_failures == 1
    for request, i in zip(requests, ids, strict=True):
        assert result(engine.outcomes[i]) == plain(language_model(), request)


@pytest.mark.parametrize("call", range(1, 7))
def test_an_interrupted_target_that_cannot_rewind_keeps_the_interrupt(call: int) -> None:
    target = FailingModel(LANGUAGE, KeyboardInterrupt(), stored=True)
    target.rewind = "none"
    target.fail_at = call
    engine = Engine(target)
    request = Request(PROMPT, GREEDY, max_tokens=8, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


def test_bad_logits_of_one_sequence_leave_all_as_they_were() -> None:
    poison = (3, 3, 3)

    def logits(tokens: Sequence[int]) -> Logits:
        row = LANGUAGE(tokens)
        return np.full_like(row, np.nan) if tuple(tokens[:3]) == poison and len(tokens) > 4 else row

    engine = CheckedEngine(FakeModel(VOCABULARY, logits))
    request = Request(PROMPT, GREEDY, max_tokens=12, ignore_end=True)
    good = engine.submit(request)
    bad = engine.submit(Request(poison, GREEDY, max_tokens=12, ignore_end=True))
    with pytest.raises(BackendError, match="nan"):
        while True:
            engine.step()
    for outcome in engine.outcomes.values():
        engine.check(outcome, decoding=True)
    engine.engine.cancel(bad)
    while engine.outcomes[good].finish_reason is None:
        engine.step()
    assert result(engine.outcomes[good]) == plain(language_model(), request)


def test_an_interrupted_submit_holds_no_sequence() -> None:
    class Interrupted(SuffixDrafter):
        asked = 0

        def begin(self, sequence: int, tokens: Sequence[int]) -> None:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            super().begin(sequence, tokens)

    engine = Engine(language_model(max_sequences=1), [Interrupted()])
    request = Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


# Sampling


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_seed_gives_the_same_text(sampled: bool) -> None:
    def run(seed: int | None) -> Completion:
        engine = Engine(language_model(), [other_vocabulary_drafter(sampled=sampled)], FixedPolicy(p_min=0))
        sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=seed)
        return engine.generate(Request(PROMPT, sampling, max_tokens=40, ignore_end=True))

    free = run(None)
    assert run(free.seed).tokens == free.tokens
    assert run(free.seed + 1).tokens != free.tokens
    assert run(7).seed == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_length_of_zero_is_plain_decoding(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0, seed=3)
    request = Request(PROMPT, sampling, max_tokens=40, ignore_end=True)
    drafters = [model_drafter(LANGUAGE, sampled=True)]
    off = Engine(language_model(), drafters, FixedPolicy(draft_max=0)).generate(request)
    engine = Engine(language_model(), drafters, FixedPolicy(draft_max=5))
    plainly = engine.generate(replace(request, speculate=False))
    assert (off.tokens, off.text, off.seed) == (plainly.tokens, plainly.text, plainly.seed)
    assert all(not record.draft for record in plainly.records)


TINY = FakeVocabulary("ab")
TINY_LANGUAGE = random_logits(3, seed=2, order=2, scale=1.0)
AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def exact_text_probabilities(
    logits: NextLogits, prompt: Sequence[int], length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens, or shorter with an end token."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    done: dict[tuple[int, ...], float] = {}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            row = np.exp(logits([*prompt, *text]).astype(np.float64))
            for token, share in enumerate(row / row.sum()):
                (done if token == TINY.size - 1 else grown)[(*text, token)] = probability * share
        texts = grown
    return done | texts


def chi_square(counts: dict[tuple[int, ...], int], exact: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare texts pooled."""
    total = sum(counts.values())
    common = [text for text, p in exact.items() if p * total >= 5]
    observed = [counts.get(text, 0) for text in common]
    expected = [exact[text] * total for text in common]
    rest = total - sum(expected)
    if rest >= 5:
        observed.append(total - sum(observed))
        expected.append(rest)
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True)), len(expected) - 1


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("p_min", [0.0, 0.45])
def test_sampled_output_follows_the_model_exactly(sampled: bool, p_min: float) -> None:
    target = FakeModel(TINY, TINY_LANGUAGE)
    draft = FakeModel(TINY, random_logits(3, seed=9, order=2, scale=1.0))
    drafter = ModelDrafter(draft, compare_vocabularies(TINY, TINY), sampled=sampled)
    engine = Engine(target, [drafter], FixedPolicy(draft_max=3, draft_min=2, p_min=p_min))
    counts: dict[tuple[int, ...], int] = {}
    prompt, num_accepted = (0, 1), 0
    for seed in range(2000):
        sampling = replace(AS_IT_IS, seed=seed)
        completion = engine.generate(Request(prompt, sampling, max_tokens=4))
        counts[completion.tokens] = counts.get(completion.tokens, 0) + 1
        num_accepted += sum(record.num_accepted for record in completion.records)
    exact = exact_text_probabilities(TINY_LANGUAGE, prompt, 4)
    assert set(counts) <= set(exact) and num_accepted > 200
    statistic, freedom = chi_square(counts, exact)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5
