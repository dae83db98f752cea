"""The call that reads a prompt's end and gives the first token, with anything that can happen beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from engines import GREEDY, ScriptedDrafter, random_guess
from outrider.backends.fake import FakeModel, random_logits
from outrider.core.contracts import Drafter, Policy
from outrider.core.data import Completion, Grammar, Logits, Request, Span
from outrider.core.errors import BackendError
from outrider.core.params import SamplingParams
from outrider.costs import CallCosts
from outrider.costs.curve import CallPoint
from outrider.drafters.lookup import SuffixDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.models.vocab import compare
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy

WORDS = Pieces("a", "b", "c", "ab", "bc", "cab")
LOGITS = random_logits(WORDS.size, seed=4, order=3)
TEXTS = ("abcabbcacab", "abcabbb", "abcab")
MAX_SEQUENCES = 4
KINDS: list[dict[str, Any]] = [
    {"rewind": "free"},
    {"rewind": "window"},
    {"rewind": "checkpoints"},
    {"rewind": "none"},
]


class Failing(FakeModel):
    """Some of its calls fail, before or after the tokens were stored. `num_failures` are left."""

    def __init__(self, rng: np.random.Generator, num_failures: int, **options: Any) -> None:
        super().__init__(WORDS, LOGITS, max_sequences=MAX_SEQUENCES, **options)
        self._rng, self._num_failures = rng, num_failures
        self.has_failed = False

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        fails, is_late = self._num_failures and self._rng.random() < 0.2, self._rng.random() < 0.5
        self._num_failures -= bool(fails)
        self.has_failed = self.has_failed or bool(fails)
        if fails and not is_late:
            raise BackendError("model", "it fails before")
        rows = super().decode(spans)
        if fails:
            raise BackendError("model", "it fails after")
        return rows


def model(rng: np.random.Generator) -> Failing:
    kind = KINDS[rng.integers(len(KINDS))]
    return Failing(
        rng,
        int(rng.integers(0, 3)),
        max_batch_tokens=int(rng.choice([4, 5, 8, 16, 64])),
        max_rows=int(rng.choice([4, 5, 8, 64])),
        **kind,
    )


def drafters(rng: np.random.Generator) -> list[Drafter]:
    draft = FakeModel(WORDS, random_logits(WORDS.size, seed=9), max_sequences=MAX_SEQUENCES)
    every: list[Drafter] = [
        SuffixDrafter(min_match=1),
        ScriptedDrafter(random_guess(int(rng.integers(100)), WORDS.size)),
        ModelDrafter(draft, compare(WORDS, WORDS)),
    ]
    return [drafter for drafter in every if rng.random() < 0.6]


def policy(rng: np.random.Generator) -> Policy:
    measured = CallCosts([CallPoint(n, 1e-5 * (1 + 0.1 * n)) for n in (1, 4, 16, 64)])
    draft_costs = CallCosts([CallPoint(n, 1e-7 * (1 + 0.1 * n)) for n in (1, 4, 16, 64)])
    policies: list[Policy] = [
        FixedPolicy(int(rng.integers(0, 9)), p_min=0, hand_over=0),
        AutoPolicy(),
        AutoPolicy(measured, draft_costs),
    ]
    return policies[rng.integers(len(policies))]


def request(rng: np.random.Generator, shared: Sequence[int]) -> Request:
    sizes = [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 63, 64, 65, 66, 80]
    prompt = (
        *shared[: int(rng.integers(0, len(shared)))],
        *rng.integers(0, WORDS.size - 1, rng.choice(sizes)),
    )
    is_greedy, is_limited = rng.random() < 0.7, rng.random() < 0.3
    return Request(
        tuple(map(int, prompt)),
        GREEDY if is_greedy else SamplingParams(temperature=1.0, seed=int(rng.integers(9))),
        max_tokens=int(rng.choice([1, 1, 2, 5, 12])),
        stop=("cab",) if rng.random() < 0.2 else (),
        grammar=Grammar("choice") if is_limited else None,
        logprobs=2 if rng.random() < 0.3 else None,
        ignore_end=not is_limited and bool(rng.random() < 0.5),
        speculate=bool(rng.random() < 0.9),
    )


def engine_of(target: FakeModel, *drafting: Any, **options: Any) -> Engine:
    return Engine(target, *drafting, constrain=lambda _grammar: OneOf(WORDS, TEXTS), **options)


def plain(asked: Request) -> Completion:
    target = FakeModel(WORDS, LOGITS)
    return engine_of(target).generate(replace(asked, speculate=False))


def scored(completion: Completion) -> list[tuple[int, float]]:
    return [(s.token, round(s.logprob, 4)) for r in completion.records for s in r.logprobs]


def first_tokens_cost_no_call(completion: Completion, target: FakeModel) -> None:
    """Whoever reads any of a prompt gets the first token with the rest of it, unless the call was full."""
    decoded = [record for record in completion.records if record.kind == "decode"]
    read = [record for record in completion.records if record.kind == "prefill"]
    if not decoded or decoded[0].read_tokens or not read:
        return
    assert read[-1].batch_tokens + read[-1].num_sequences > min(target.max_batch_tokens, target.max_rows)


class Run:
    """Requests that come, are cancelled and fail at random."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.target = model(rng)
        gap_s = [None, 1e-9, 1e-4, 10.0][rng.integers(4)]
        self.engine = engine_of(self.target, drafters(rng), policy(rng), max_gap_s=gap_s)
        shared = rng.integers(0, WORDS.size - 1, 70).tolist()
        self.waiting = [request(rng, shared) for _ in range(rng.integers(1, 7))]
        self.asked: dict[int, Request] = {}
        self.found: dict[int, Completion] = {}
        self._rng = rng

    def __iter__(self) -> Iterator[tuple[Request, Completion]]:
        """Every request and what became of it."""
        for _ in range(1000):
            self._admit()
            self._cancel()
            self._step()
            if not self.waiting and not self.engine.num_running:
                break
        assert self.found.keys() == self.asked.keys() and not self.waiting
        yield from ((self.asked[number], completion) for number, completion in self.found.items())

    def _admit(self) -> None:
        is_time = not self.engine.num_running or self._rng.random() < 0.4
        if self.waiting and is_time and self.engine.has_room(self.waiting[0]):
            first = self.waiting.pop(0)
            self.asked[self.engine.submit(first)] = first
            if self._rng.random() < 0.2:
                self.waiting.append(replace(first, max_tokens=3))  # its prompt is there

    def _cancel(self) -> None:
        if self.asked and self._rng.random() < 0.05:
            number = int(self._rng.choice(list(self.asked)))
            if (cancelled := self.engine.cancel(number)) is not None:
                self.found[number] = cancelled

    def _step(self) -> None:
        lengths = {sequence.slot: len(sequence.tokens) for sequence in self.engine._running}
        try:
            updates = self.engine.step()
        except BackendError:
            assert {sequence.slot: len(sequence.tokens) for sequence in self.engine._running} == lengths
            assert all(self.target.length(slot) < length for slot, length in lengths.items())
            return
        self.found |= {u.record.request: u.completion for u in updates if u.completion is not None}


@given(seed=st.integers(0, 10**9))
def test_whatever_happens_beside_it_the_text_is_the_plain_one(seed: int) -> None:
    run = Run(np.random.default_rng(seed))
    for asked, completion in run:
        if asked.sampling.temperature == 0:
            expected, size = plain(asked), len(completion.tokens)
            assert completion.tokens == expected.tokens[:size]
            assert scored(completion) == scored(expected)[:size]
            end = (completion.text, completion.finish_reason, completion.is_complete)
            assert completion.finish_reason == "cancelled" or end == (
                expected.text, expected.finish_reason, expected.is_complete,
            )  # fmt: skip
        assert completion.tokens == tuple(t for record in completion.records for t in record.tokens)
        if not run.target.has_failed:  # else what was read last may be there
            first_tokens_cost_no_call(completion, run.target)
