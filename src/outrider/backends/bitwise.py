"""Text whose bits do not depend on drafts, on how prompts are cut up, or on what else runs: sizes of calls
that give a token the same bits, found out by calls, and a model that makes no others.

What is summed up in a call depends, in its last bits, on how many tokens the call has and on where in the
cache a sequence's tokens lie among others'. So only sizes that were tried are ever used, they are tried after
more tokens than the attention kernels take in one block, and every comparison is of many rows: two kernels
that sum in another order agree on some by chance."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, repeat
from operator import eq
from statistics import median
from time import perf_counter

import numpy as np

from outrider.core.contracts import FREE, Model, SavedState, SavingModel, check_copy, check_spans
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, OutriderError, RewindUnsupported
from outrider.costs.calibrate import CallTimer, Clock, Progress, ordinary_tokens

TRIED = (*range(1, 10), 12, 16, 20, 24, 28, 31, 32, 48, 64)
"""Drafts are mostly short; kernels step at multiples of 4, 8 and 16, at 32 and at 64."""
CONTEXT_TOKENS = 264
"""Attention kernels pad a cache to 256 cells, and may change beyond the first 256."""
_CHAIN_TOKENS = 12
"""Rows that calls of a small size are compared by."""
_FILL_TOKENS = 8
_REJECTED_SHARE = 0.3
"""of the calls of the last comparison hold tokens that are forgotten, as rejected drafts are"""
_PRICE_ROUNDS = 5
_PROMPT_TOKENS = 128

Digests = list[bytes]
"""The bits of rows of logits, one digest for each."""


@dataclass(frozen=True, slots=True)
class EqualSizes:
    """Numbers of tokens, ascending: in calls over any of them a token has the same logits, bit by bit. Raises
    ValueError.

    >>> sizes = EqualSizes((2, 3, 4, 8))
    >>> sizes.parts(1), sizes.parts(5), sizes.parts(20), sizes.padding
    ([(1, 2)], [(5, 8)], [(7, 8), (7, 8), (6, 8)], 3)
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError(f"{self.sizes} are no sizes of calls")

    @property
    def most(self) -> int:
        return self.sizes[-1]

    @property
    def padding(self) -> int:
        """The most filler tokens that a call ever needs."""
        return max(b - a for a, b in pairwise((0, *self.sizes))) - 1

    def parts(self, num_tokens: int) -> list[tuple[int, int]]:
        """The calls for so many tokens: how many of them each takes, and the size that it is padded to."""
        number = -(-num_tokens // self.most)
        share, remainder = divmod(num_tokens, number)
        counts = [share + 1] * remainder + [share] * (number - remainder)
        return [(count, self.sizes[bisect_left(self.sizes, count)]) for count in counts]

    def __str__(self) -> str:
        sizes = set(self.sizes)
        firsts = [size for size in self.sizes if size - 1 not in sizes]
        lasts = [size for size in self.sizes if size + 1 not in sizes]
        runs = zip(firsts, lasts, strict=True)
        return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


@dataclass(frozen=True, slots=True)
class Price:
    """How much longer a plain step and reading a prompt take, as parts of the time that they took."""

    step: float
    prompt: float

    def __str__(self) -> str:
        step, prompt = (
            "as long as else" if round(part, 2) <= 0 else f"{part:.0%} longer"
            for part in (self.step, self.prompt)
        )
        return f"a plain step takes {step}, reading a prompt {prompt}"


@dataclass(frozen=True, slots=True)
class Equality:
    """What was found: sizes of calls that give equal bits, the kind of attention that they need and, once
    measured, their price; or no sizes, and the reason."""

    sizes: EqualSizes | None
    reason: str = ""
    flash_attention: str = "auto"
    price: Price | None = None


def find_equality(model: Model, *, hasty: bool = False, progress: Progress = lambda _part: None) -> Equality:
    """Try calls on sequence 0 of `model`, which is empty before and after. Of several groups of sizes that
    agree that with the smallest call is taken. `hasty`: a few calls are enough where single tokens need
    padding."""
    if not model.rewinding.is_possible:
        return Equality(None, "the model cannot forget single tokens")
    with _Calls(model) as calls:
        if calls.room == 0:
            return Equality(None, f"a context of {model.context_length} tokens is too small to find out")
        if hasty and calls.chain(1) != calls.chain(2):
            return Equality(None, "single tokens need padding")
        filled = calls.fill((size, size) for size in repeat(calls.fill_size))
        progress(0.3)
        groups: list[tuple[list[int], Digests]] = []
        """sizes that gave the same bits, and the rows by which that is known"""
        for size in calls.sizes:
            rows = calls.chain(size)
            alike = (group for group in groups if all(map(eq, group[1], rows)))
            sizes, known = next(alike, (list[int](), list[bytes]()))
            if not sizes:
                groups.append((sizes, known))
            sizes.append(size)
            known += rows[len(known) :]
        progress(0.6)
        equal = [sizes for sizes, _ in groups if len(sizes) > 1]
        if not equal:
            return Equality(None, "no two sizes of calls give a token the same bits")
        found = EqualSizes(tuple(min(equal)))
        calls.clear()
        again = calls.fill(calls.any_of(found, 1))
        if calls.fill_size not in found.sizes:
            calls.clear()
            filled = calls.fill(calls.any_of(found, 2))
        progress(1.0)
        if again != filled:
            return Equality(None, f"calls of {found} tokens agree, but not everywhere in a longer text")
        return Equality(found)


class _Calls(AbstractContextManager["_Calls"]):
    """Calls on a text of random ordinary tokens; the sequence is left empty."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._rng = random.Random(0)
        largest = min(model.max_rows, model.max_batch_tokens, model.context_length // 2)
        self.sizes = [size for size in TRIED if size <= largest]
        longest = max(self.sizes[-1], 2 * _CHAIN_TOKENS)
        self.fill_size = min(_FILL_TOKENS, self.sizes[-1])
        self.room = max(min(CONTEXT_TOKENS, model.context_length - longest), 0)
        self.room -= self.room % self.fill_size
        """tokens that precede every trial"""
        tokens = ordinary_tokens(model.vocabulary, self._rng)
        self._text = [tokens[i % len(tokens)] for i in range(CONTEXT_TOKENS + 2 * longest)]

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def clear(self) -> None:
        self._model.truncate(0, 0)

    def any_of(self, sizes: EqualSizes, seed: int) -> Iterator[tuple[int, int]]:
        """Calls of these sizes in any order, and how many tokens of each are kept."""
        rng = random.Random(seed)
        while True:
            size = rng.choice(sizes.sizes)
            kept = rng.randint(1, size) if rng.random() < _REJECTED_SHARE else size
            yield size, kept

    def fill(self, calls: Iterable[tuple[int, int]]) -> Digests:
        """Read the text by these calls; the bits of its rows. What a call holds beyond the tokens that are
        kept is forgotten again."""
        return self._read(calls, self.room)

    def chain(self, size: int) -> Digests:
        """A dozen rows at least, of calls of one size after what is stored."""
        start = self._model.length(0)
        digests = self._read(repeat((size, size)), -(-_CHAIN_TOKENS // size) * size)
        self._model.truncate(0, start)
        return digests

    def _read(self, calls: Iterable[tuple[int, int]], count: int) -> Digests:
        digests: Digests = []
        first = self._model.length(0)
        for size, kept in calls:
            start = first + len(digests)
            kept = min(kept, count - len(digests))
            filler = (self._rng.choice(self._text) for _ in range(size - kept))
            digests += self._rows((*self._text[start : start + kept], *filler))[:kept]
            self._model.truncate(0, start + kept)
            if len(digests) == count:
                break
        return digests

    def _rows(self, tokens: Sequence[int]) -> Digests:
        span = Span(0, tuple(tokens), self._model.length(0), len(tokens))
        return [blake2b(row.tobytes(), digest_size=16).digest() for row in self._model.decode([span])[0]]


def measure_price(plain: Model, equal: Model, *, clock: Clock = perf_counter) -> Price:
    """By calls of both in turn, after a short context. Sequence 0 of both is empty afterwards."""
    timers = [CallTimer(model, "last", clock, random.Random(0)) for model in (plain, equal)]
    size = min(_PROMPT_TOKENS, plain.context_length - 1, equal.context_length - 1)
    prompts: tuple[list[float], list[float]] = ([], [])
    steps: tuple[list[float], list[float]] = ([], [])
    with timers[0], timers[1]:
        for i in range(_PRICE_ROUNDS):
            for j in (0, 1) if i % 2 else (1, 0):
                timers[j].clear()
                prompts[j].append(timers[j].fill(size))
                steps[j].append(timers[j].call_s(1))
    return Price(*(median(times[1]) / median(times[0]) - 1 for times in (steps, prompts)))


class BitwiseModel:
    """A Model over one context for each sequence on the shared weights, in which its tokens lie in order from
    the first cell on. `open_lane` opens one of `context_length` tokens, which has to be able to rewind.

    A call of fewer tokens than an equal size has is padded with a filler that is forgotten again, a longer
    span is evaluated in several calls. Rows are asked for of a whole call or not at all, since how many there
    are is a size as well."""

    rewinding = FREE
    attends_to_all = False

    def __init__(
        self,
        open_lane: Callable[[int], SavingModel],
        sizes: EqualSizes,
        *,
        context_length: int,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
    ) -> None:
        self.sizes = sizes
        self._lanes: list[SavingModel] = []
        try:
            for _ in range(max_sequences):  # fillers need a little room beyond the context
                self._lanes.append(open_lane(context_length + sizes.padding))
        except BaseException:
            self.close()
            raise
        self.inner = self._lanes[0]
        """one of the contexts, to be asked for what all of them have in common"""
        self.name = self.inner.name
        self.vocabulary = self.inner.vocabulary
        self.max_sequences = max_sequences
        self.context_length = min(context_length, self.inner.context_length - sizes.padding)
        self.capacity_tokens = min(
            capacity_tokens or context_length * max_sequences, self.context_length * max_sequences
        )
        self.max_batch_tokens = self.inner.max_batch_tokens
        self.max_rows = self.inner.max_rows
        if sizes.most > min(self.max_rows, self.max_batch_tokens):
            raise BackendError(self.name, f"it makes no calls of {sizes.most} tokens", "Probe it again.")

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        check_spans(self, spans)  # a lane would find out too late, when others have been evaluated
        try:
            return [self._evaluate(self._lanes[span.sequence], span) for span in spans]
        except BaseException:  # an interrupt as well
            for span in spans:
                lane = self._lanes[span.sequence]
                with suppress(OutriderError):
                    lane.truncate(0, min(span.start, lane.length(0)))
                if lane.length(0) > span.start:
                    lane.truncate(0, 0)
            raise

    def _evaluate(self, lane: SavingModel, span: Span) -> Logits:
        rows: list[Logits] = []
        start, first = 0, len(span.tokens) - span.rows
        for num_tokens, size in self.sizes.parts(len(span.tokens)):
            end = start + num_tokens
            tokens = span.tokens[start:end] + (span.tokens[end - 1],) * (size - num_tokens)
            wanted = max(end - max(start, first), 0)
            logits = lane.decode([Span(0, tokens, span.start + start, size if wanted else 0)])[0]
            if size > num_tokens:
                lane.truncate(0, span.start + end)
            if wanted:
                rows.append(logits[num_tokens - wanted : num_tokens])
                if end < len(span.tokens):
                    rows[-1] = rows[-1].copy()
            start = end
        if not rows:
            return np.empty((0, self.vocabulary.size), dtype=np.float32)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def length(self, sequence: int) -> int:
        if not 0 <= sequence < self.max_sequences:
            raise BackendError("sequence", f"there is none numbered {sequence}")
        return self._lanes[sequence].length(0)

    def reach(self, sequence: int, length: int) -> int:  # noqa: ARG002
        return length

    def truncate(self, sequence: int, length: int) -> None:
        self.length(sequence)
        self._lanes[sequence].truncate(0, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        check_copy(self, source, sequence, length)
        lane = self._lanes[sequence]
        lane.restore(0, self._lanes[source].save(0))
        try:
            lane.truncate(0, length)
        except RewindUnsupported:
            lane.truncate(0, 0)
            raise

    def save(self, sequence: int) -> SavedState:
        self.length(sequence)
        return self._lanes[sequence].save(0)

    def restore(self, sequence: int, state: SavedState) -> None:
        self.length(sequence)
        self._lanes[sequence].restore(0, state)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
