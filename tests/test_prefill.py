"""How prompts share a call: by need, and nobody waits for ever."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import (
    GREEDY,
    LANGUAGE,
    VOCABULARY,
    ScriptedDrafter,
    greedy_continuation,
    language_model,
    oracle,
    same_vocabulary,
)
from outrider.backends.fake import FakeModel
from outrider.core.contracts import RewindKind
from outrider.core.data import Completion, Logits, Request, Span
from outrider.core.params import Drafting, SamplingParams
from outrider.costs import CallCosts
from outrider.costs.curve import CallPoint
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.engine.loop import GAP_STEPS, MAX_TOKENS, Pace, chunks
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.session.readout import read_out

UNREAD = st.dictionaries(st.integers(0, 9), st.integers(1, 500), max_size=6)


@given(UNREAD, st.integers(-3, 300))
def test_no_room_is_lost_and_none_is_made_up(unread: dict[int, int], room: int) -> None:
    shares = chunks(unread, room)
    assert sum(shares.values()) == min(max(room, 0), sum(unread.values()))
    assert all(0 < size <= unread[key] for key, size in shares.items())


@given(UNREAD.filter(len), st.integers(1, 300))
def test_the_oldest_always_gets_on(unread: dict[int, int], room: int) -> None:
    oldest = next(iter(unread))
    assert chunks(unread, room)[oldest] >= min(unread[oldest], (room + 1) // 2)


def test_the_short_one_is_not_held_up_by_a_long_one() -> None:
    assert chunks({0: 1000, 1: 40, 2: 100}, 128) == {0: 64, 1: 40, 2: 24}


def test_those_that_decode_are_not_held_up_long() -> None:
    pace = Pace(max_gap_s=0.6)
    assert pace.tokens(0) == MAX_TOKENS
    assert 0 < pace.tokens(2) < MAX_TOKENS
    for _ in range(50):
        pace.note(2, 0, 0, 0.1)
        pace.note(2, 0, 100, 1.1)
    assert pace.gap_s(2) == 0.6
    assert pace.tokens(2) == 25, "half of what is left beside a plain step"
    for _ in range(50):
        pace.note(2, 0, 100, 100.0)
    assert 1 < pace.tokens(2) < 25
    for _ in range(50):
        pace.note(2, 0, 100, 0.101)
    assert pace.tokens(2) == pace.tokens(0) == MAX_TOKENS


def test_without_a_limit_it_follows_from_plain_steps() -> None:
    pace = Pace()
    assert pace.gap_s(4) == math.inf
    pace.note(3, 0, 0, 0.2)
    pace.note(8, 0, 0, 0.4)
    assert pace.gap_s(4) == GAP_STEPS * 0.2 and pace.gap_s(7) == GAP_STEPS * 0.4


def test_a_plain_step_takes_no_longer_than_one_with_drafts() -> None:
    pace = Pace()
    pace.note(1, 8, 100, 1.0)
    assert pace.gap_s(1) == math.inf, "a prompt was read in it"
    for seconds in (0.3, 0.2, 0.25):
        pace.note(1, 8, 0, seconds)
    assert pace.gap_s(1) == GAP_STEPS * 0.2
    for _ in range(50):
        pace.note(1, 0, 0, 0.4)
    assert pace.gap_s(1) == pytest.approx(GAP_STEPS * 0.4), "plain ones tell when they become slower"


class Timed(FakeModel):
    """A model whose calls take `plain_ms`, and `token_ms` for each token, by its own clock or that of the one
    `beside` it."""

    def __init__(self, plain_ms: float, token_ms: float, beside: Timed | None = None, **options: Any) -> None:
        super().__init__(VOCABULARY, LANGUAGE, **options)
        self._plain_ms, self._token_ms = plain_ms, token_ms
        self._first = beside or self
        self.now_ms = 0.0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        self._first.now_ms += self._plain_ms + self._token_ms * sum(len(span.tokens) for span in spans)
        return super().decode(spans)

    @property
    def costs(self) -> CallCosts:
        """What its calls take, as it would be measured."""
        sizes = (1, 2, 4, 8, 16, 32, 64)
        points = [CallPoint(n, (self._plain_ms + n * self._token_ms) / 1000) for n in sizes]
        return CallCosts(points, prefill_token_s=self._token_ms / 1000)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Meanwhile the engine's time is the model's."""
        with pytest.MonkeyPatch.context() as patch:
            for module in ("engine.loop", "engine.sequence", "drafters.model"):
                patch.setattr(f"outrider.{module}.perf_counter", lambda: self.now_ms / 1000)
            yield


def test_the_tokens_of_the_first_call_share_its_time() -> None:
    target = Timed(5, 9)
    with target.clock():
        done = Engine(target).generate(Request((0, 1, 2, 3, 0), GREEDY, max_tokens=2, ignore_end=True))
    first, second = done.records
    assert (first.read_tokens, first.num_evaluated) == (4, 1)
    assert (first.read_s, first.verify_s, first.total_s) == pytest.approx((0.040, 0.010, 0.050))
    assert (second.read_s, second.verify_s, second.total_s) == pytest.approx((0, 0.014, 0.014))


@pytest.mark.parametrize("size", [1, 5, 64, 65, 150])
def test_reading_and_decoding_are_the_whole_time(size: int) -> None:
    target = Timed(100, 1)
    engine = Engine(target, [ModelDrafter(Timed(10, 1, target), same_vocabulary())], FixedPolicy(2, p_min=0))
    with target.clock():
        prompt = tuple(i % 4 for i in range(size))
        done = engine.generate(Request(prompt, GREEDY, max_tokens=9, ignore_end=True))
    readout = read_out(done)
    assert readout.prefill_s + readout.decode_s == pytest.approx(target.now_ms / 1000)
    assert readout.read_tokens == size - 1 and readout.draft_prefill_calls == -(-(size - 1) // 16)
    num_first = next(i for i, record in enumerate(done.records, 1) if record.tokens)
    first_s = sum(record.total_s for record in done.records[:num_first])
    assert done.records[num_first - 1].end_s == pytest.approx(first_s), "the time to the first token"


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 150), st.integers(1, 12)), min_size=1, max_size=12
    ),
    plain_ms=st.integers(5, 200),
    token_ms=st.integers(1, 20),
)
def test_no_step_is_long_and_no_prompt_waits_for_ever(
    arrivals: list[tuple[int, int, int]], plain_ms: int, token_ms: int
) -> None:
    target = Timed(plain_ms, token_ms, context_length=256, max_batch_tokens=512, max_sequences=8)
    gap_ms = plain_ms + 60 * token_ms
    engine = Engine(target, max_gap_s=gap_ms / 1000)
    left, steps, submitted = list(arrivals), 0, dict[int, int]()
    with target.clock():
        while left or engine.num_running:
            while left and left[0][0] <= steps % 8 and engine.num_running < 8:
                _, size, max_tokens = left.pop(0)
                prompt = tuple(i % 4 for i in range(size))
                asked = Request(prompt, GREEDY, max_tokens, ignore_end=True)
                submitted[engine.submit(asked)] = steps
            before_ms = target.now_ms
            records = [update.record for update in engine.step()]
            steps += 1
            decoding = [record for record in records if record.kind == "decode" and not record.read_tokens]
            reading = [record for record in records if record not in decoding]
            if decoding and reading:
                # Before anything is known 64 tokens are read; a chunk of 16 and last tokens in any case.
                assert target.now_ms - before_ms <= gap_ms + token_ms * (len(records) + 16)
            for record in records:
                if record.finish_reason is not None:
                    del submitted[record.request]
            # Every step reads 16 tokens at least, and the oldest prompt gets half of them.
            assert all(steps - start <= 8 * 150 // 8 + 12 for start in submitted.values())


@pytest.mark.parametrize("rewind", ["free", "checkpoints"])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_drafts_are_kept_short_where_others_wait(others: int, rewind: RewindKind) -> None:
    target = Timed(100, 1, rewind=rewind)
    draft = ScriptedDrafter(oracle(LANGUAGE), acceptance=0.99)
    engine = Engine(target, [draft], AutoPolicy(target.costs), max_gap_s=0.11)
    for _ in range(1 + others):
        engine.submit(Request((0, 1, 2), GREEDY, max_tokens=60, ignore_end=True))
    longest = 0
    with target.clock():
        engine.step()  # nobody waits for a token but the first
        while updates := engine.step():
            if len(updates) == 1 + others:  # one that is left alone drafts as far as it pays
                longest = max(longest, updates[0].record.batch_drafted)
    assert (0 < longest <= 10) if others else longest > 10


def test_nobody_waits_for_another_token_before_the_first() -> None:
    target = Timed(100, 1)
    draft = ScriptedDrafter(oracle(LANGUAGE), acceptance=0.99)
    engine = Engine(target, [draft], AutoPolicy(target.costs), max_gap_s=0.001)
    for _ in range(2):
        engine.submit(Request((0, 1, 2), GREEDY, max_tokens=60, ignore_end=True))
    with target.clock():
        drafted = [engine.step()[0].record.batch_drafted for _ in range(5)]
    assert drafted[0] > 0 and drafted[1:] == [0] * 4, "then a step is a plain one"


@pytest.mark.parametrize("num_sequences", [2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gap_ms", [110, 150, 200])
def test_what_a_draft_model_takes_is_part_of_the_step(
    gap_ms: int, temperature: float, num_sequences: int
) -> None:
    target = Timed(100, 2)
    draft = Timed(10, 0.2, target)
    policy = AutoPolicy(target.costs, draft.costs)
    engine = Engine(target, [ModelDrafter(draft, same_vocabulary())], policy, max_gap_s=gap_ms / 1000)
    sampling, drafted = SamplingParams(temperature=temperature, seed=3), 0
    for first in range(num_sequences):
        engine.submit(Request((first, 1, 2), sampling, max_tokens=40, ignore_end=True))
    with target.clock():
        before_ms = target.now_ms
        while len(updates := engine.step()) == num_sequences:
            record = updates[0].record
            drafted += record.batch_drafted
            assert record.read_tokens or target.now_ms - before_ms <= gap_ms + 2
            assert record.batch_drafted or not record.work.calls, (
                "it is asked only for tokens that are then drafted"
            )
            before_ms = target.now_ms
    assert drafted or gap_ms == 110


def test_lookups_of_others_leave_time_for_a_draft_model() -> None:
    target = Timed(100, 2)
    draft = Timed(10, 0.2, target)
    lookup = ScriptedDrafter(oracle(LANGUAGE), acceptance=0.99)
    policy = AutoPolicy(target.costs, draft.costs)
    engine = Engine(target, [lookup, ModelDrafter(draft, same_vocabulary())], policy, max_gap_s=0.15)
    for drafting in (Drafting("lookup"), Drafting("model")):
        engine.submit(Request((0, 1, 2), GREEDY, max_tokens=60, ignore_end=True, drafting=drafting))
    sources = set[str]()
    with target.clock():
        before_ms = target.now_ms
        while len(updates := engine.step()) == 2:
            sources |= {source for update in updates for source in update.record.draft.sources}
            assert updates[0].record.read_tokens or target.now_ms - before_ms <= 150 + 2
            before_ms = target.now_ms
    assert sources == {"scripted", "draft"}


def test_a_draft_model_reads_a_prompt_in_parts_where_others_wait() -> None:
    target = language_model(context_length=400, max_batch_tokens=400)
    draft = language_model(context_length=400, max_batch_tokens=80)  # 20 for each sequence
    engine = Engine(target, [ModelDrafter(draft, same_vocabulary())], FixedPolicy(4, p_min=0))
    prompts = [(0,), tuple(i % 4 for i in range(100)), tuple(i % 3 for i in range(90))]
    submitted = [engine.submit(Request(prompts[0], GREEDY, max_tokens=60, ignore_end=True))]
    engine.step()
    submitted += [engine.submit(Request(p, GREEDY, max_tokens=60, ignore_end=True)) for p in prompts[1:]]
    completions, num_read = dict[int, Completion](), 0
    while updates := engine.step():
        work = updates[0].record.work
        assert work.prefill_calls <= 1 and work.prefill_tokens <= 20
        num_read += work.prefill_tokens
        completions |= {u.record.request: u.completion for u in updates if u.completion is not None}
    assert num_read == 99 + 89
    for number, prompt in zip(submitted, prompts, strict=True):
        assert list(completions[number].tokens) == greedy_continuation(LANGUAGE, prompt, 60)
        assert any(record.draft for record in completions[number].records)
    alone = engine.generate(Request((3, *prompts[1]), GREEDY, max_tokens=9))
    assert alone.records[0].work.prefill_calls == 5
