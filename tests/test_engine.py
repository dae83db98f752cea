"""The engine on exact little models: whatever is drafted, the output is plain decoding's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import (
    END,
    GREEDY,
    LANGUAGE,
    PROMPT,
    VOCABULARY,
    CheckedEngine,
    ScriptedDrafter,
    greedy_continuation,
    language_model,
    model_drafter,
    nothing,
    oracle,
    other_vocabulary_drafter,
    plain,
    random_guess,
    reduced_drafter,
    result,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel, NextLogits, random_logits, scripted_logits
from outrider.core.contracts import Drafter
from outrider.core.data import Completion, Logits, Request, Row, Span, StepRecord
from outrider.core.errors import BackendError, InputError, PromptError, RewindUnsupported
from outrider.core.notices import collect_notices
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import PREFILL_CHUNK_TOKENS, Engine
from outrider.policy.fixed import FixedPolicy

DRAFTERS: dict[str, Callable[[], list[Drafter]]] = {
    "itself": lambda: [model_drafter(LANGUAGE)],
    "another model": lambda: [model_drafter(random_logits(VOCABULARY.size, seed=12))],
    "another vocabulary": lambda: [other_vocabulary_drafter()],
    "a reduced vocabulary": lambda: [reduced_drafter()],
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


def test_tokens_after_a_stop_are_not_counted_as_accepted() -> None:
    script = scripted_logits(VOCABULARY, "abcd ")
    engine = CheckedEngine(FakeModel(VOCABULARY, script), [ScriptedDrafter(oracle(script))])
    [outcome] = engine.run(Request(PROMPT, GREEDY, stop=("cd",)))
    [record] = [record for record in outcome.records if record.kind == "decode"]
    assert (len(record.draft), record.num_accepted, len(record.tokens)) == (8, 4, 4)
    assert (outcome.text, outcome.finish_reason) == ("ab", "stop")


def test_a_stop_that_is_certain_only_at_the_end_is_one() -> None:
    # "abc" may become "abcc", so "bc" is not yet the stop that starts first.
    engine = Engine(FakeModel(VOCABULARY, scripted_logits(VOCABULARY, "abcd ")))
    completion = engine.generate(Request(PROMPT, GREEDY, max_tokens=3, stop=("bc", "abcc")))
    assert (completion.text, completion.finish_reason) == ("a", "stop")


def test_no_token_is_drafted_that_could_not_be_emitted() -> None:
    engine = CheckedEngine(language_model(), [ScriptedDrafter(oracle(LANGUAGE))])
    [outcome] = engine.run(Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True))
    assert [len(record.draft) for record in outcome.records if record.kind == "decode"] == [4]


def test_an_accepted_token_is_credited_to_its_drafter() -> None:
    script = scripted_logits(VOCABULARY, "abcd ")
    drafters = [ScriptedDrafter(oracle(script, 2))]
    engine = Engine(FakeModel(VOCABULARY, script), drafters, FixedPolicy(draft_max=3))
    updates = list(engine.stream(Request(PROMPT, GREEDY, max_tokens=9, ignore_end=True)))
    sources = [piece.source for piece in updates[-1].pieces]
    assert sources == ["scripted", "scripted", "target"]


# Several sequences


@given(
    seed=st.integers(0, 10**6),
    max_batch_tokens=st.sampled_from([4, 5, 7, 16, 64]),
    max_rows=st.sampled_from([4, 5, 9, 64]),
)
def test_sequences_side_by_side_say_what_each_says_alone(
    seed: int, max_batch_tokens: int, max_rows: int
) -> None:
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
    target = language_model(max_batch_tokens=max_batch_tokens, max_rows=max_rows)
    engine = CheckedEngine(target, drafters)
    first = engine.submit(requests[0])
    for _ in range(3):
        if engine.outcomes[first].finish_reason is None:
            engine.step()
    outcomes = [engine.outcomes[first], *engine.run(*requests[1:])]
    for request, outcome in zip(requests, outcomes, strict=True):
        assert result(outcome) == plain(language_model(), request)


@pytest.mark.parametrize("options", [{}, {"rewind": "none"}, {"rewind": "checkpoints"}, {"max_rows": 1}])
@pytest.mark.parametrize(
    ("size", "batch", "calls"), [(1, 64, 1), (2, 64, 1), (64, 64, 1), (65, 64, 2), (66, 64, 2)]
)
def test_the_last_prompt_token_is_no_call_of_its_own(
    options: dict[str, Any], size: int, batch: int, calls: int
) -> None:
    prompt = tuple(i % 4 for i in range(size))
    target = language_model(context_length=200, max_batch_tokens=batch, **options)
    engine = Engine(target)
    completion = engine.generate(Request(prompt, GREEDY, max_tokens=5, ignore_end=True))
    expected = calls + (options.get("rewind") == "checkpoints" and size == 64)  # one in the prompt
    assert len(target.calls) == expected + 4
    assert list(completion.tokens) == list(greedy_continuation(LANGUAGE, prompt, 5))
    assert sum(record.kind == "decode" for record in completion.records) == 5
    read = sum(r.read_tokens + r.num_evaluated * (r.kind == "prefill") for r in completion.records)
    assert read == size - 1
    # The same again: all but the last token is there, or a part of it.
    again = engine.generate(Request((*prompt, 1, 2), GREEDY, max_tokens=1, ignore_end=True))
    assert list(again.tokens) == list(greedy_continuation(LANGUAGE, (*prompt, 1, 2), 1))
    if again.reused_tokens and options.get("rewind") != "checkpoints":
        assert len(again.records) == 1 and again.records[0].read_tokens == size + 1 - again.reused_tokens


def test_prompts_that_end_in_one_call_give_their_first_tokens_in_it() -> None:
    target = language_model(max_sequences=3)
    engine = CheckedEngine(target)
    prompts = [(0, 1, 2), (3,), (2, 2, 1, 0, 3)]
    for prompt in prompts:
        engine.submit(Request(prompt, GREEDY, max_tokens=4, ignore_end=True))
    engine.step()
    assert len(target.calls) == 1
    for number, prompt in enumerate(prompts):
        assert list(engine.outcomes[number].tokens) == list(greedy_continuation(LANGUAGE, prompt, 1))


def test_a_long_prompt_is_read_in_chunks_while_others_go_on() -> None:
    options = {"context_length": 1000, "max_batch_tokens": 1000}
    engine = CheckedEngine(language_model(**options))
    short = engine.submit(Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True))
    engine.step()
    prompt = (3, *PROMPT * 120)
    long = engine.submit(Request(prompt, GREEDY, max_tokens=2, ignore_end=True))
    while engine.step():
        pass
    *prefill, first, _ = engine.outcomes[long].records
    assert len(prefill) >= 2 and {record.kind for record in prefill} == {"prefill"}
    assert max(r.num_evaluated for r in prefill) <= PREFILL_CHUNK_TOKENS
    assert first.kind == "decode" and first.num_evaluated == 1 and len(first.tokens) == 1
    assert sum(r.num_evaluated for r in prefill) + first.read_tokens == len(prompt) - 1
    assert engine.outcomes[short].records[-1].num_sequences == 2 or len(prefill) == 2
    assert tuple(engine.outcomes[long].tokens) == tuple(greedy_continuation(LANGUAGE, prompt, 2))


@pytest.mark.parametrize("max_sequences", [2, 8])
def test_more_requests_than_may_run_are_refused_and_the_others_go_on(max_sequences: int) -> None:
    engine = CheckedEngine(language_model(max_sequences=max_sequences))
    engine.engine.max_running = 2
    requests = [Request((i,), GREEDY, max_tokens=4, ignore_end=True) for i in range(3)]
    ids = [engine.submit(request) for request in requests[:2]]
    with pytest.raises(InputError, match="2 are running"):
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


def test_a_cancelled_stream_ends_with_what_was_made() -> None:
    engine = Engine(FakeModel(VOCABULARY, scripted_logits(VOCABULARY, "abcd ")))
    stream = engine.stream(Request(PROMPT, GREEDY, max_tokens=30, stop=("bcc",)))
    text = "".join(next(stream).text for _ in range(3))
    engine.cancel(0)
    with pytest.raises(StopIteration) as end:
        next(stream)
    completion: Completion = end.value.value
    assert text == "a"  # what may be a stop string was held back
    assert (completion.text, completion.finish_reason, len(completion.tokens)) == ("abc", "cancelled", 3)


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


def test_others_can_draft_from_the_next_request_on() -> None:
    target = FakeModel(VOCABULARY, LANGUAGE)
    engine = Engine(target, [SuffixDrafter()])
    before = engine.generate(Request(PROMPT, GREEDY, max_tokens=12))
    engine.equip((), FixedPolicy(0))
    plain = engine.generate(Request(PROMPT, GREEDY, max_tokens=12))
    assert plain.tokens == before.tokens
    assert sum(len(record.draft) for record in plain.records) == 0
    assert plain.reused_tokens == len(PROMPT) - 1
    engine.submit(Request(PROMPT, max_tokens=4))
    with pytest.raises(InputError, match="requests are running"):
        engine.equip([SuffixDrafter()])


def test_drafters_hear_that_a_request_has_ended() -> None:
    drafter = ScriptedDrafter(nothing)
    engine = Engine(language_model(), [drafter])
    engine.generate(Request(PROMPT, GREEDY, max_tokens=3))
    assert drafter.ended == [0]
    engine.cancel(engine.submit(Request(PROMPT, GREEDY, max_tokens=3)))
    assert drafter.ended == [0, 0]


def test_the_policy_sees_every_step() -> None:
    seen: list[StepRecord] = []

    class Watching(FixedPolicy):
        def observe(self, records: Mapping[int, StepRecord]) -> None:
            seen.extend(records.values())

    completion = Engine(language_model(), [], Watching()).generate(Request(PROMPT, GREEDY, max_tokens=5))
    assert tuple(seen) == completion.records


# What fails, and what is left after it


def recurrent_model() -> FakeModel:
    return FakeModel(VOCABULARY, LANGUAGE, rewind="none", max_sequences=1)


def test_a_target_that_cannot_rewind_decodes_plainly() -> None:
    with collect_notices() as notices:
        engine = Engine(recurrent_model(), [ScriptedDrafter(oracle(LANGUAGE))])
    assert ["decoding plainly" in notice for notice in notices] == [True]
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
    """A sliding window: it can take back no more than `most_back` tokens."""

    most_back = 3

    def truncate(self, sequence: int, length: int) -> None:
        if 0 < length < self.length(sequence) - self.most_back:
            raise RewindUnsupported(self.name, "the window no longer holds it")
        super().truncate(sequence, length)


def test_a_window_that_cannot_be_rewound_far_enough_is_evaluated_anew() -> None:
    target = ForgetfulModel(VOCABULARY, LANGUAGE, rewind="window")
    request = Request(PROMPT, GREEDY, max_tokens=20, ignore_end=True)
    completion = Engine(target, [ScriptedDrafter(oracle(LANGUAGE, 1))]).generate(request)
    assert completion.tokens == plain(language_model(), request)[0]
    assert any(record.num_evaluated > 1 + len(record.draft) for record in completion.records[1:])


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
    target = FailingModel(LANGUAGE, KeyboardInterrupt(), stored=True, rewind="none")
    target.fail_at = call
    engine = Engine(target)
    request = Request(PROMPT, GREEDY, max_tokens=8, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


def test_an_interrupted_submit_holds_no_sequence() -> None:
    class Interrupted(SuffixDrafter):
        asked = 0

        def begin(self, sequence: int, request: Request) -> None:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            super().begin(sequence, request)

    engine = Engine(language_model(max_sequences=1), [Interrupted()])
    request = Request(PROMPT, GREEDY, max_tokens=5, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(request)
    assert engine.generate(request).tokens == plain(language_model(), request)[0]


# Sampled requests: their seeds, and the seed-stable rule

AS_IT_IS = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)
KINDS: tuple[DraftSampling, ...] = ("greedy", "sampled", "auto")
RULES: tuple[Rule, ...] = ("token", "block", "stable")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_text(rule: Rule, kind: DraftSampling) -> None:
    def run(seed: int | None) -> Completion:
        engine = Engine(language_model(), [other_vocabulary_drafter()], FixedPolicy(p_min=0))
        sampling = replace(AS_IT_IS, seed=seed)
        verification = Verification(rule, kind)
        return engine.generate(
            Request(PROMPT, sampling, max_tokens=40, ignore_end=True, verification=verification)
        )

    free = run(None)
    assert run(free.seed).tokens == free.tokens
    assert run(free.seed + 1).tokens != free.tokens
    assert run(7).seed == 7


def drafter_sets() -> list[list[Drafter]]:
    near = random_logits(6, seed=12, order=3, scale=1.0)

    def like_it(tokens: Sequence[int]) -> Row:
        return (LANGUAGE(tokens) + near(tokens)).astype(np.float32)

    return [
        [],
        [SuffixDrafter(1)],
        [model_drafter(LANGUAGE)],
        [model_drafter(like_it)],
        [other_vocabulary_drafter()],
        [reduced_drafter()],
        [ScriptedDrafter(lambda _text, n: [3, 3, 3][:n]), model_drafter(like_it)],
    ]


STABLE = {
    "mild": SamplingParams(temperature=0.7, repeat_penalty=1.3, frequency_penalty=0.2, top_k=4),
    "hot": SamplingParams(temperature=1.3, presence_penalty=0.5, top_k=0, top_p=1, min_p=0, min_tokens=10),
    "repeats": SamplingParams(temperature=1.0, dry_multiplier=0.8, xtc_probability=0.5, banned=(2,)),
}


@pytest.mark.parametrize("settings", STABLE)
@pytest.mark.parametrize(
    "kind", ["sampled", *(pytest.param(k, marks=pytest.mark.slow) for k in ("greedy", "auto"))]
)
def test_the_stable_text_does_not_depend_on_drafts(settings: str, kind: DraftSampling) -> None:
    sampling = replace(STABLE[settings], seed=11)
    request = Request(
        PROMPT, sampling, max_tokens=40, ignore_end=True, verification=Verification("stable", kind)
    )
    expected = Engine(language_model()).generate(replace(request, speculate=False))
    assert len(expected.tokens) == 40
    num_accepted = 0
    for drafters in drafter_sets():
        for draft_max in (1, 3, 8):
            engine = Engine(language_model(), drafters, FixedPolicy(draft_max, p_min=0, hand_over=0))
            found = engine.generate(request)
            assert (found.tokens, found.text) == (expected.tokens, expected.text)
            num_accepted += sum(record.num_accepted for record in found.records)
        plainly = engine.generate(replace(request, speculate=False))
        assert (plainly.tokens, plainly.text) == (expected.tokens, expected.text)
    assert num_accepted > 100
    other = Engine(language_model()).generate(replace(request, sampling=replace(sampling, seed=12)))
    assert other.tokens != expected.tokens


def test_a_drawn_stable_draft_that_is_the_target_always_stands() -> None:
    """Target and draft pick by the same noise, at the same place."""
    sampling = replace(AS_IT_IS, temperature=1.3, seed=5)
    request = Request(PROMPT, sampling, max_tokens=40, ignore_end=True, verification=Verification("stable"))
    completion = Engine(language_model(), [model_drafter(LANGUAGE)], FixedPolicy(3, p_min=0)).generate(
        request
    )
    assert all(record.num_accepted == len(record.draft) for record in completion.records)
    assert sum(record.num_accepted for record in completion.records) > 20


def test_two_requests_at_once_do_not_share_their_chances() -> None:
    """Each has a generator of its own: what it says does not depend on its neighbours."""

    def tokens(engine: Engine, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        streams = [
            engine.stream(Request(PROMPT, replace(AS_IT_IS, seed=seed), max_tokens=20, ignore_end=True))
            for seed in seeds
        ]
        said: list[tuple[int, ...]] = [() for _ in seeds]
        for stream in streams:
            for update in islice(stream, 1):
                said[streams.index(stream)] += update.record.tokens
        for i, stream in enumerate(streams):
            for update in stream:
                said[i] += update.record.tokens
        return said

    def engine() -> Engine:
        return Engine(language_model(), [other_vocabulary_drafter()], FixedPolicy(3, p_min=0))

    alone = [tokens(engine(), [seed])[0] for seed in (1, 2)]
    assert tokens(engine(), [1, 2]) == alone and alone[0] != alone[1]


# Logits that are no numbers, and log probabilities


SAMPLED = SamplingParams()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_commit_nothing(bad: float) -> None:
    """Not even after accepted tokens; and they end no request but their own."""
    spoiled = [False]

    def logits(tokens: Sequence[int]) -> Row:
        row = LANGUAGE(tokens).copy()
        if spoiled[0] and tokens[0] == 1 and len(tokens) > 9:
            row[2] = bad
        return row

    cases: list[tuple[Rule, SamplingParams]] = [("auto", GREEDY), ("block", SAMPLED), ("stable", SAMPLED)]
    for rule, params in cases:
        spoiled[0] = False
        model = FakeModel(VOCABULARY, logits)
        engine = CheckedEngine(model, [ScriptedDrafter(oracle(LANGUAGE, 3))])
        ids = [
            engine.submit(
                Request((i, *PROMPT), replace(params, seed=1), 20, (), True, True, Verification(rule))
            )
            for i in range(2)
        ]
        while not all(engine.outcomes[i].tokens for i in ids):
            engine.step()
        spoiled[0] = True
        good, broken = (engine.outcomes[i] for i in ids)
        while broken.finish_reason is None:
            before = list(broken.tokens)
            engine.step()
        assert (broken.finish_reason, broken.tokens) == ("error", before)
        assert isinstance(broken.error, BackendError)
        while engine.step():
            pass
        assert good.finish_reason == "length"


# Log probabilities


def scored(sampling: SamplingParams, drafters: Sequence[Drafter], **settings: Any) -> Completion:
    asked = Request(PROMPT, sampling, max_tokens=30, ignore_end=True, logprobs=3)
    engine = Engine(language_model(), drafters, FixedPolicy(p_min=0, hand_over=0))
    return engine.generate(replace(asked, **settings))


SCORED = {
    "greedy": GREEDY,
    "penalties": replace(GREEDY, repeat_penalty=1.5, banned=(1,)),
    "stable": SamplingParams(temperature=1.2, seed=4, top_k=3),
}


@pytest.mark.parametrize("settings", SCORED)
def test_every_token_has_plain_decodings_log_probability(settings: str) -> None:
    verification = Verification("stable")
    expected = scored(SCORED[settings], [], speculate=False, verification=verification)
    num_accepted = 0
    for drafters in ([SuffixDrafter(1)], [model_drafter(LANGUAGE)], [other_vocabulary_drafter()]):
        found = scored(SCORED[settings], drafters, verification=verification)
        assert found.tokens == expected.tokens and found.logprobs == expected.logprobs
        num_accepted += sum(record.num_accepted for record in found.records)
    assert num_accepted > 10
    assert [entry.token for entry in expected.logprobs] == list(expected.tokens)
    text = list(PROMPT)
    for entry in expected.logprobs:
        row = LANGUAGE(text).astype(np.float64)
        logs = row - np.log(np.exp(row).sum())
        best = np.argsort(-logs)[:3]
        assert entry.logprob == pytest.approx(logs[entry.token], abs=1e-5)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(logs[best].tolist(), abs=1e-5)
        assert not entry.forced
        text.append(entry.token)


def test_log_probabilities_are_asked_for() -> None:
    assert scored(GREEDY, [], logprobs=None).logprobs == ()
    only = scored(GREEDY, [], logprobs=0)
    assert len(only.logprobs) == 30 and all(entry.top == () for entry in only.logprobs)


def test_tokens_after_the_end_are_not_scored() -> None:
    asked = Request(PROMPT, GREEDY, max_tokens=30, logprobs=1, stop=("c",))
    for drafters in ([], [ScriptedDrafter(oracle(LANGUAGE))]):
        completion = Engine(language_model(), drafters).generate(asked)
        assert [entry.token for entry in completion.logprobs] == list(completion.tokens)
        for record in completion.records:
            assert len(record.logprobs) == len(record.tokens)


def test_forced_tokens_say_so() -> None:
    only = SamplingParams(temperature=1.0, banned=tuple(t for t in range(VOCABULARY.size) if t != 3))
    completion = scored(only, [SuffixDrafter(1)])
    assert set(completion.tokens) == {3}
    assert all(entry.forced and entry.logprob < 0 for entry in completion.logprobs)
    two = SamplingParams(temperature=1.0, banned=tuple(t for t in range(VOCABULARY.size) if t not in (2, 3)))
    assert not any(entry.forced for entry in scored(two, []).logprobs)
