"""Measure what calls of a model cost: a few seconds, spent where they tell most."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from time import perf_counter
from typing import Literal, Self

from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Span
from outrider.core.errors import BackendError
from outrider.costs.curve import MAX_TOKENS, CallCosts, CallPoint

Rows = Literal["all", "last"]
"""The rows of logits that a call gives: all for a target, the last for a draft model."""

Clock = Callable[[], float]  # seconds from any start, never going back

Progress = Callable[[float], None]
"""Called with the part that is done, or of the time that is spent, from 0 to 1."""

DEFAULT_SECONDS = 6.0
GPU_SECONDS = 4.5  # there calls are short
GLANCE_SECONDS = 0.5  # of measuring that a session may begin with

_WARM_UP = (1, 4, 1)
_SWITCH_TOKENS = 4  # of calls that take turns with plain ones
_CHUNK_TOKENS = 128  # of a prompt at once: few, so that Ctrl-C and the budget are heeded in between
_MIN_ROUNDS, _FIRM_ROUNDS, _MAX_ROUNDS = 3, 5, 15
_FIRM_RATIO = 0.015  # standard error of a median below which it needs no further samples
_FEW_RATIO = 0.3  # what a single sample may be off by
# Standard error of a median, for normal noise, over the median deviation and the root of the samples.
_MEDIAN_ERROR = 1.2533 * 1.4826

_SIZES = (1, 2, 3, 4, 5, 6, 8, 16, 7, 12, 32, 9, 24, 10, 20, 13, 14, 11, 15, 17, 64, 48, 28, 40, 33, 25, 56)
"""Numbers of tokens in the order of their use. Drafts are mostly short; kernels step at multiples of 4
and 8 and one beside them."""
_GPU_FIRST = (1, 2, 4, 8, 9)  # kernels there step after 8
_FIRST_SIZES = 8
# Measured at longer contexts too: attention grows with both, without stairs of its own.
_CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (512, 2048, 8192, 32768)
_SWITCH_SHARE, _BASE_SHARE = 0.2, 0.6  # of the time, for changes of size and before contexts


class CallTimer:
    """Times calls of random ordinary tokens. As a context manager it leaves every sequence of the model
    empty, and makes some calls first that are not timed: they read the weights and start the threads."""

    def __init__(self, model: Model, rows: Rows, clock: Clock, rng: random.Random) -> None:
        self.model, self._rows, self._clock = model, rows, clock
        self._tokens = ordinary_tokens(model.vocabulary, rng)
        self.largest = min(MAX_TOKENS, model.max_batch_tokens, model.context_length)
        if rows == "all":
            self.largest = min(self.largest, model.max_rows)

    def clear(self) -> None:
        for sequence in range(self.model.max_sequences):
            self.model.truncate(sequence, 0)

    def __enter__(self) -> Self:
        try:
            self.clear()
            for size in _WARM_UP:
                self.call_s(min(size, self.largest))
        except BaseException:
            self.clear()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def call_s(self, num_tokens: int) -> float:
        """Seconds of one call over so many tokens of the first sequence; what it stored is forgotten."""
        length = self.model.length(0)
        rows = num_tokens if self._rows == "all" else 1
        span = Span(0, self._take(length, num_tokens), length, rows, checkpoint=rows > 1)
        before = self._clock()
        self.model.decode([span])
        seconds = self._clock() - before
        self.model.truncate(0, self.model.reach(0, length))
        return seconds

    def fill(self, num_tokens: int) -> float:
        """Store up to so many further tokens in the first sequence, in one call; its seconds per token."""
        length = self.model.length(0)
        tokens = self._take(length, min(num_tokens, _CHUNK_TOKENS, self.model.max_batch_tokens))
        before = self._clock()
        self.model.decode([Span(0, tokens, length, 0)])
        return (self._clock() - before) / len(tokens)

    def _take(self, start: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._tokens[i % len(self._tokens)] for i in range(start, start + num_tokens))


def ordinary_tokens(vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Tokens of ordinary text: what a call costs may depend on them where a model sends them to different
    experts."""
    drawn = [rng.randrange(vocabulary.size) for _ in range(8 * MAX_TOKENS)]
    ordinary = [t for t in drawn if not vocabulary.is_control(t) and not vocabulary.ends_generation(t)]
    if not ordinary:
        raise BackendError("vocabulary", "it has no ordinary tokens to measure with", "Choose another model.")
    return ordinary


@dataclass(slots=True)
class Samples:
    """Times of one kind of call."""

    num_tokens: int
    context_tokens: int = 0
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
        return _MEDIAN_ERROR * deviation / float(len(self.seconds) ** 0.5) / middle if middle > 0 else 0.0

    @property
    def is_firm(self) -> bool:
        """Further samples would hardly change the median."""
        number = len(self.seconds)
        return number >= _MAX_ROUNDS or (number >= _FIRM_ROUNDS and self.spread_ratio < _FIRM_RATIO)

    def point(self) -> CallPoint:
        return CallPoint(self.num_tokens, self.median_s, self.context_tokens, self.spread_ratio)


def calibrate(
    model: Model,
    *,
    seconds: float = DEFAULT_SECONDS,
    rows: Rows = "all",
    on_gpu: bool = False,
    clock: Clock = perf_counter,
    progress: Progress = lambda _part: None,
) -> CallCosts:
    """Measure calls of `model` for about `seconds`, or less where every median is firm before.

    Calls of all sizes are interleaved in shuffled rounds, so that a busy moment of the machine spoils no
    single size, at an empty context first, then at longer ones where model and time allow. `rows` are the
    logits that the engine will ask this model for. `on_gpu`: calls are timed after equal ones, and what one
    of another size takes longer by itself. The model's sequences are empty before and after. Raises
    BackendError when a call fails.
    """
    plan = _Plan(model, rows, clock, seconds, progress, on_gpu=on_gpu)
    longest = model.context_length if model.rewinding.is_free else 0
    with plan:
        # A single token is measured often enough whatever the time is: all else is compared with it.
        for _ in range(_MIN_ROUNDS):
            plan.sample(plan.taken[0])
        switch_s = plan.switch_s()
        plan.sizes(_BASE_SHARE if longest >= _CONTEXTS[0] + plan.largest else 1.0)
        plan.prefill(longest)
        at_contexts = plan.contexts(longest)
        plan.clear()
        plan.sizes(1.0)
    part = model.vocabulary.part_of
    points = [samples.point() for samples in (*plan.taken, *at_contexts) if samples.seconds]
    window = part.window if part else 0
    return CallCosts(points, prefill_token_s=plan.prefill_token_s, window=window, switch_s=switch_s)


class _Plan(CallTimer):
    """What was sampled so far, and what to sample next."""

    def __init__(
        self, model: Model, rows: Rows, clock: Clock, seconds: float, progress: Progress, *, on_gpu: bool
    ) -> None:
        super().__init__(model, rows, clock, random.Random(0))
        self._num_equal = 2 if on_gpu else 0  # calls before each that is timed
        self._seconds, self._progress = seconds, progress
        self._rng, self._started = random.Random(1), clock()
        sizes = dict.fromkeys((*_GPU_FIRST, *_SIZES) if on_gpu else _SIZES)
        self._waiting = [size for size in sizes if size <= self.largest]
        self.taken = [Samples(size) for size in self._waiting[:_FIRST_SIZES]]  # at an empty context
        del self._waiting[:_FIRST_SIZES]
        self.prefill_token_s: float | None = None

    def sizes(self, share: float) -> None:
        """Calls of every size at an empty context, until this share of the time is spent: of another one as
        soon as all that are open can still be sampled often enough."""
        until = self._started + share * self._seconds
        while self._round(self.taken, until):
            missing = ((max(_MIN_ROUNDS - len(s.seconds), 0), s.num_tokens) for s in self.taken)
            left_s = until - self._clock() - sum(n * self._expected_s(size) for n, size in missing)
            while self._waiting:
                left_s -= _MIN_ROUNDS * self._expected_s(self._waiting[0])
                if left_s < 0:
                    break
                self.taken.append(Samples(self._waiting.pop(0)))

    def prefill(self, longest: int) -> None:
        """What reading a prompt takes, where a tenth of the time will do."""
        largest = self.largest
        if longest >= 4 * largest and self._expected_s(largest) * 2 <= 0.1 * self._seconds:
            self.prefill_token_s = self.fill(2 * largest)

    def contexts(self, longest: int) -> list[Samples]:
        """Calls at longer contexts: each is reached from the one before, as far as the time allows."""
        until, largest, found = self._started + self._seconds, self.largest, list[Samples]()
        sizes = [size for size in _CONTEXT_SIZES if size <= largest]
        round_s = sum(map(self._expected_s, sizes))
        for context in _CONTEXTS:
            if context + largest > longest:
                break
            while (missing := context - self.model.length(0)) > 0:
                token_s = self.prefill_token_s or self._expected_s(largest) / largest
                if self._clock() + token_s * missing + _MIN_ROUNDS * round_s > until:
                    return found
                self.prefill_token_s = self.fill(missing)
                self._report()
            found += [Samples(size, context) for size in sizes]
            for _ in range(_FIRM_ROUNDS):
                self._round(found[-len(sizes) :], until)
        return found

    def switch_s(self) -> float:
        """How much longer a call takes on a GPU after one of another size: the library makes its graph anew;
        one that keeps a single captured graph captures it again besides, at the second equal call."""
        sizes, longer, until = (
            (1, _SWITCH_TOKENS),
            list[float](),
            self._started + _SWITCH_SHARE * self._seconds,
        )
        most = _FIRM_ROUNDS if self._num_equal and self.largest >= _SWITCH_TOKENS else 0
        round_s = sum(map(self._expected_s, sizes))
        while len(longer) < most and self._clock() + round_s <= until:
            one, several = ([self.call_s(size) for _ in range(3)] for size in sizes)
            longer.append(one[0] - one[2] + several[0] - several[2])
        return max(median(longer or [0.0]) / 2, 0.0)

    def _round(self, kinds: Sequence[Samples], until: float) -> bool:
        """One sample of each kind that is not yet firm, in any order; False when none was taken."""
        unsettled = [samples for samples in kinds if not samples.is_firm]
        self._rng.shuffle(unsettled)
        taken = False
        for samples in unsettled:
            if self._clock() + self._expected_s(samples.num_tokens) <= until:
                self.sample(samples)
                taken = True
        return taken

    def sample(self, samples: Samples) -> None:
        # A GPU keeps the work of the last call and replays an equal one: of equal calls the first finds other
        # work there, and the second prepares its own.
        for _ in range(self._num_equal):
            self.call_s(samples.num_tokens)
        samples.seconds.append(self.call_s(samples.num_tokens))
        self._report()

    def _report(self) -> None:
        self._progress(min((self._clock() - self._started) / max(self._seconds, 1e-9), 1.0))

    def _expected_s(self, num_tokens: int) -> float:
        """What such a sample may take, by the nearest size that was sampled and in proportion."""
        sampled = [s for s in self.taken if s.seconds]
        near = min(sampled, key=lambda s: abs(s.num_tokens - num_tokens))
        call_s = near.median_s * max(1.0, num_tokens / near.num_tokens)
        return (1 + self._num_equal) * call_s
