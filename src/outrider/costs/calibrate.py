"""Measure what calls of a model cost: a few seconds, spent where they tell most."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median, median_low
from time import perf_counter
from typing import Literal

from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Span
from outrider.core.errors import BackendError
from outrider.costs.curve import CallCosts
from outrider.costs.points import MAX_TOKENS, CallPoint

DEFAULT_SECONDS = 6.0

Progress = Callable[[float], None]
"""Called with how much of the time is spent, from 0 to 1."""

SIZES = (1, 2, 3, 4, 5, 6, 8, 16, 7, 12, 32, 9, 24, 10, 20, 13, 14, 11, 15, 17, 64, 48, 28, 40, 33, 25, 56)
"""Numbers of tokens in the order of their use. Drafts are mostly short; kernels step at multiples of 4
and 8 and one beside them."""
_FIRST_SIZES = 8
_CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
"""measured at longer contexts too: attention grows with both, without stairs of its own"""
_CONTEXTS = (512, 2048, 8192, 32768)

_MIN_ROUNDS = 3
_SETTLED_ROUNDS = 5
_MAX_ROUNDS = 15
_SETTLED_RATIO = 0.015
"""Standard error of a median below which it needs no further samples."""

# Parts of the time: single calls first, then contexts, then several sequences.
_BASE_SHARE = 0.6
_CONTEXT_SHARE = 0.3


def calibrate(
    model: Model,
    *,
    seconds: float = DEFAULT_SECONDS,
    rows: Rows = "all",
    clock: Clock = perf_counter,
    progress: Progress | None = None,
    seed: int = 0,
) -> CallCosts:
    """Measure calls of `model` for about `seconds`, or less where every median is firm before.

    Calls of all sizes are interleaved in shuffled rounds, so that a busy moment of the machine spoils
    no single size; a point is the median of its samples. At an empty context first, then at
    longer ones and for several sequences at once where model and time allow. `rows` are the logits
    that the engine will ask this model for. The model's sequences are empty before and after.

    Raises BackendError when a call fails.
    """
    timer = CallTimer(model, rows, clock, random.Random(seed))
    plan = _Plan(timer, clock, seconds, progress or (lambda _part: None), random.Random(seed + 1))
    longest = model.context_length if model.rewind == "free" else 0
    try:
        timer.clear()
        timer.warm_up()
        plan.start()
        fewer = longest < _CONTEXTS[0] + timer.largest
        share = _BASE_SHARE + (_CONTEXT_SHARE if fewer else 0.0)
        plan.sizes(share if model.max_sequences > 1 or not fewer else 1.0)
        plan.prefill(longest)
        plan.contexts(longest, _BASE_SHARE + _CONTEXT_SHARE if model.max_sequences > 1 else 1.0)
        timer.clear()
        plan.sequences(model.max_sequences)
        plan.sizes(1.0)
    finally:
        timer.clear()
    part = model.vocabulary.part_of
    return CallCosts(
        [samples.point() for samples in plan.samples()],
        prefill_token_s=plan.prefill_token_s,
        window=part.window if part is not None else 0,
    )


class _Plan:
    """What was sampled so far, and what to sample next."""

    def __init__(
        self, timer: CallTimer, clock: Clock, seconds: float, progress: Progress, rng: random.Random
    ) -> None:
        self._timer = timer
        self._clock = clock
        self._seconds = seconds
        self._progress = progress
        self._rng = rng
        self._started = clock()
        self._samples: dict[tuple[int, int, int], Samples] = {}
        self._waiting = [size for size in SIZES if size <= timer.largest]
        self._open: list[Samples] = []
        self.prefill_token_s: float | None = None

    def start(self) -> None:
        """A single token is measured often enough whatever the time is: all else is compared with it."""
        self._admit(self._waiting[:_FIRST_SIZES])
        for _ in range(_MIN_ROUNDS):
            self._take(self._open[0])

    def samples(self) -> Iterable[Samples]:
        """Everything that was sampled at all."""
        return [samples for samples in self._samples.values() if samples.seconds]

    def sizes(self, share: float) -> None:
        """Calls of every size at an empty context, until this share of the time is spent."""
        until = self._started + share * self._seconds
        while self._round(self._open, until):
            self._admit_affordable(until)

    def prefill(self, longest: int) -> None:
        """What reading a prompt takes, where a tenth of the time will do."""
        if longest < 4 * self._timer.largest:
            return
        chunk = 2 * self._timer.largest
        if self._expected_s(self._timer.largest) * 2 <= 0.1 * self._seconds:
            self.prefill_token_s = self._timer.fill(chunk)

    def contexts(self, longest: int, share: float) -> None:
        """Calls at longer contexts: each is reached from the one before, as far as the time allows."""
        until = self._started + share * self._seconds
        stored = self._timer.stored
        for context in _CONTEXTS:
            if context + self._timer.largest > longest:
                return
            sizes = [size for size in _CONTEXT_SIZES if size <= self._timer.largest]
            round_s = sum(self._expected_s(size) for size in sizes)
            while stored() < context:
                token_s = self.prefill_token_s or self._expected_s(self._timer.largest) / self._timer.largest
                if self._clock() + token_s * (context - stored()) + _MIN_ROUNDS * round_s > until:
                    return
                self.prefill_token_s = self._timer.fill(context - stored())
                self._report()
            samples = [self._kept(size, context, 1) for size in sizes]
            for _ in range(_SETTLED_ROUNDS):
                self._round(samples, until)

    def sequences(self, most: int) -> None:
        """Calls shared by several sequences."""
        for number in (2, 4, 8, 16):
            if number <= most:
                sizes = [size for size in (number, 2 * number, 4 * number) if size <= self._timer.largest]
                samples = [self._kept(size, 0, number) for size in sizes]
                for _ in range(_MIN_ROUNDS):
                    self._round(samples, self._started + self._seconds)

    # Rounds

    def _round(self, kinds: Iterable[Samples], until: float) -> bool:
        """One sample of each kind that is not yet firm, in any order; False when none was taken."""
        unsettled = [samples for samples in kinds if not _is_settled(samples)]
        self._rng.shuffle(unsettled)
        taken = False
        for samples in unsettled:
            if self._clock() + self._expected_s(samples.num_tokens) <= until:
                self._take(samples)
                taken = True
        return taken

    def _take(self, samples: Samples) -> None:
        samples.seconds.append(self._timer.call_s(samples.num_tokens, samples.num_sequences))
        self._report()

    def _report(self) -> None:
        self._progress(
            min((self._clock() - self._started) / self._seconds, 1.0) if self._seconds > 0 else 1.0
        )

    def _admit(self, sizes: Iterable[int]) -> None:
        for size in list(sizes):
            self._waiting.remove(size)
            self._open.append(self._kept(size, 0, 1))

    def _admit_affordable(self, until: float) -> None:
        """Open further sizes while all that are open can still be sampled often enough."""
        left = until - self._clock()
        left -= sum(self._expected_s(s.num_tokens) * max(_MIN_ROUNDS - len(s.seconds), 0) for s in self._open)
        for size in list(self._waiting):
            left -= _MIN_ROUNDS * self._expected_s(size)
            if left < 0:
                return
            self._admit([size])

    def _kept(self, num_tokens: int, context: int, num_sequences: int) -> Samples:
        key = (num_tokens, context, num_sequences)
        return self._samples.setdefault(key, Samples(*key))

    def _expected_s(self, num_tokens: int) -> float:
        """What such a call may take, by the nearest size that was sampled and in proportion."""
        sampled = [s for s in self._open if s.seconds]
        near = min(sampled, key=lambda s: abs(s.num_tokens - num_tokens))
        return near.median_s * max(1.0, num_tokens / near.num_tokens)


def _is_settled(samples: Samples) -> bool:
    number = len(samples.seconds)
    firm = number >= _SETTLED_ROUNDS and samples.spread_ratio < _SETTLED_RATIO
    return firm or number >= _MAX_ROUNDS


# One timed call after another, on a model whose sequences are this module's for the time.

Rows = Literal["all", "last"]
"""The rows of logits that a call gives: all for a target, the last for a draft model."""

Clock = Callable[[], float]
"""Seconds from any start, never going back."""

_WARM_UP = (1, 4, 1)
"""Calls made before any is timed: they read the weights from disk and start the threads."""
_CHUNK_TOKENS = 128
"""Tokens of a prompt read at once: few, so that Ctrl-C and the budget are heeded in between."""
_DEVIATIONS_PER_MAD = 1.4826
_FEW_RATIO = 0.3
"""What a single sample may be off by"""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise"""


class CallTimer:
    """Times calls of random ordinary tokens. It forgets everything that the model has stored."""

    def __init__(self, model: Model, rows: Rows, clock: Clock, rng: random.Random) -> None:
        self._model = model
        self._rows = rows
        self._clock = clock
        self._tokens = ordinary_tokens(model.vocabulary, rng)
        self.largest = min(MAX_TOKENS, model.max_batch_tokens, model.context_length)
        if rows == "all":
            self.largest = min(self.largest, model.max_rows)

    def clear(self) -> None:
        """Leave every sequence of the model empty."""
        for sequence in range(self._model.max_sequences):
            self._model.truncate(sequence, 0)

    def stored(self) -> int:
        """Tokens in the first sequence."""
        return self._model.length(0)

    def warm_up(self) -> None:
        """Make some calls that are not timed."""
        for size in _WARM_UP:
            if size <= self.largest:
                self.call_s(size)

    def call_s(self, num_tokens: int, num_sequences: int = 1) -> float:
        """Seconds of one call over so many tokens, shared out evenly; what it stored is forgotten."""
        spans, given = [], 0
        for sequence in range(num_sequences):
            upto = num_tokens * (sequence + 1) // num_sequences
            length = self._model.length(sequence)
            tokens = self._take(length, upto - given)
            spans.append(Span(sequence, tokens, length, len(tokens) if self._rows == "all" else 1))
            given = upto
        before = self._clock()
        self._model.decode(spans)
        seconds = self._clock() - before
        for span in spans:
            self._model.truncate(span.sequence, span.start)
        return seconds

    def fill(self, num_tokens: int) -> float:
        """Store up to so many further tokens in the first sequence, in one call; its seconds per token."""
        length = self._model.length(0)
        tokens = self._take(length, min(num_tokens, _CHUNK_TOKENS, self._model.max_batch_tokens))
        before = self._clock()
        self._model.decode([Span(0, tokens, length, 0)])
        return (self._clock() - before) / len(tokens)

    def _take(self, start: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._tokens[i % len(self._tokens)] for i in range(start, start + num_tokens))


def ordinary_tokens(vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Tokens of ordinary text, drawn again each time: what a call costs may depend on them where a
    model sends tokens to different experts."""
    drawn = [rng.randrange(vocabulary.size) for _ in range(8 * MAX_TOKENS)]
    ordinary = [t for t in drawn if not vocabulary.is_control(t) and not vocabulary.ends_generation(t)]
    if not ordinary:
        raise BackendError("vocabulary", "it has no ordinary tokens to measure with", "Choose another model.")
    return ordinary


@dataclass(slots=True)
class Samples:
    """The times of one kind of call."""

    num_tokens: int
    context_tokens: int = 0
    num_sequences: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The middle time; of two the shorter, since what disturbs a call only prolongs it."""
        return median(self.seconds) if len(self.seconds) > 2 else median_low(self.seconds)

    @property
    def spread_ratio(self) -> float:
        """Standard error of the median, as a part of it; a guess while there are too few samples to tell."""
        if len(self.seconds) < 3:
            return _FEW_RATIO / len(self.seconds)
        middle = median(self.seconds)
        deviation = median(abs(seconds - middle) for seconds in self.seconds)
        error: float = _MEDIAN_ERROR * _DEVIATIONS_PER_MAD * deviation / len(self.seconds) ** 0.5
        return error / middle if middle > 0 else 0.0

    def point(self) -> CallPoint:
        """What goes into the curve."""
        return CallPoint(
            self.num_tokens, self.median_s, self.context_tokens, self.num_sequences, self.spread_ratio
        )
