"""Measure what calls of a model cost: a few seconds, spent where they tell most."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from statistics import fmean
from time import perf_counter, sleep

from outrider.core.contracts import Model
from outrider.costs.curve import CallCosts
from outrider.costs.timer import FIRM_ROUNDS, CallTimer, Clock, Rows, Samples

DEFAULT_SECONDS = 6.0
GPU_SECONDS = 4.5
"""there calls are short"""
GLANCE_SECONDS = 0.5
"""of measuring that a session may begin with"""

Progress = Callable[[float], None]
"""Called with the part that is done, or of the time that is spent, from 0 to 1."""

_SIZES = (1, 2, 3, 4, 5, 6, 8, 16, 7, 12, 32, 9, 24, 10, 20, 13, 14, 11, 15, 17, 64, 48, 28, 40, 33, 25, 56)
"""Numbers of tokens in the order of their use. Drafts are mostly short; kernels step at multiples of 4
and 8 and one beside them."""
_GPU_SIZES = (1, 2, 4, 8, 9, 3, 16, 6, *(size for size in _SIZES if size not in (1, 2, 4, 8, 9, 3, 16, 6)))
"""Kernels there step after 8."""
_RUN = 4
"""Equal calls in a row on a GPU: the first finds the work of another one prepared, the second prepares its
own, which the rest repeat, as plain decoding does."""
_FIRST_SIZES = 8
_CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
"""measured at longer contexts too: attention grows with both, without stairs of its own"""
_CONTEXTS = (512, 2048, 8192, 32768)

_MIN_ROUNDS = 3

# Parts of the time: single calls first, then contexts, then several sequences.
_BASE_SHARE = 0.6
_CONTEXT_SHARE = 0.3


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

    Calls of all sizes are interleaved in shuffled rounds, so that a busy moment of the machine spoils
    no single size; a point is the median of its samples. At an empty context first, then at
    longer ones and for several sequences at once where model and time allow. `rows` are the logits
    that the engine will ask this model for. `on_gpu`: each call is made several times in a row, and what the
    first takes longer is kept apart; of rows the most likely tokens are enough, as in greedy decoding. The
    model's sequences are empty before and after.

    Raises BackendError when a call fails.
    """
    plan = _Plan(model, rows, clock, seconds, progress, on_gpu=on_gpu)
    longest = model.context_length if model.rewinding.is_free else 0
    before_sequences = _BASE_SHARE + _CONTEXT_SHARE if model.max_sequences > 1 else 1.0
    with plan:
        plan.start()
        plan.sizes(_BASE_SHARE if longest >= _CONTEXTS[0] + plan.largest else before_sequences)
        plan.prefill(longest)
        plan.contexts(longest, before_sequences)
        plan.clear()
        plan.sequences(model.max_sequences)
        plan.sizes(1.0)
    part = model.vocabulary.part_of
    points = [samples.point() for samples in plan.samples if samples.seconds]
    return CallCosts(points, prefill_token_s=plan.prefill_token_s, window=part.window if part else 0)


class _Plan(CallTimer):
    """What was sampled so far, and what to sample next."""

    def __init__(
        self, model: Model, rows: Rows, clock: Clock, seconds: float, progress: Progress, *, on_gpu: bool
    ) -> None:
        super().__init__(model, rows, clock, random.Random(0), top=int(on_gpu))
        self._run, self._last = _RUN if on_gpu else 1, (0, 0)
        """equal calls in a row; tokens and sequences of the last"""
        self._seconds = seconds
        self._progress = progress
        self._rng = random.Random(1)
        self._started = clock()
        sizes = _GPU_SIZES if on_gpu else _SIZES
        self._waiting = [size for size in sizes if size <= self.largest]
        self.samples: list[Samples] = []
        self._single: list[Samples] = []
        """of one sequence, at an empty context"""
        self.prefill_token_s: float | None = None

    def _add(self, sizes: Iterable[int], context: int = 0, num_sequences: int = 1) -> list[Samples]:
        added = [Samples(size, context, num_sequences) for size in sizes if size <= self.largest]
        self.samples += added
        return added

    def start(self) -> None:
        """A single token is measured often enough whatever the time is: all else is compared with it."""
        self._single = self._add(self._waiting[:_FIRST_SIZES])
        del self._waiting[:_FIRST_SIZES]
        for _ in range(_MIN_ROUNDS):
            self._sample(self._single[0])

    def sizes(self, share: float) -> None:
        """Calls of every size at an empty context, until this share of the time is spent: of another one as
        soon as all that are open can still be sampled often enough."""
        until = self._started + share * self._seconds
        while self._round(self._single, until):
            missing = ((max(_MIN_ROUNDS - len(s.seconds), 0), s.num_tokens) for s in self._single)
            left_s = until - self._clock() - sum(n * self._expected_s(size) for n, size in missing)
            while self._waiting:
                left_s -= _MIN_ROUNDS * self._expected_s(self._waiting[0])
                if left_s < 0:
                    break
                self._single += self._add([self._waiting.pop(0)])

    def prefill(self, longest: int) -> None:
        """What reading a prompt takes, where a tenth of the time will do."""
        largest = self.largest
        if longest >= 4 * largest and self._expected_s(largest) * 2 <= 0.1 * self._seconds:
            self.prefill_token_s = self.fill(2 * largest)

    def contexts(self, longest: int, share: float) -> None:
        """Calls at longer contexts: each is reached from the one before, as far as the time allows."""
        until, largest = self._started + share * self._seconds, self.largest
        round_s = sum(self._expected_s(size) for size in _CONTEXT_SIZES if size <= largest)
        for context in _CONTEXTS:
            if context + largest > longest:
                return
            while (missing := context - self.stored()) > 0:
                token_s = self.prefill_token_s or self._expected_s(largest) / largest
                if self._clock() + token_s * missing + _MIN_ROUNDS * round_s > until:
                    return
                self.prefill_token_s = self.fill(missing)
                self._report()
            samples = self._add(_CONTEXT_SIZES, context)
            for _ in range(FIRM_ROUNDS):
                self._round(samples, until)

    def sequences(self, most: int) -> None:
        """Calls shared by several sequences."""
        for number in (2, 4, 8, 16):
            if number <= most:
                samples = self._add((number, 2 * number, 4 * number), 0, number)
                for _ in range(_MIN_ROUNDS):
                    self._round(samples, self._started + self._seconds)

    def _round(self, kinds: Iterable[Samples], until: float) -> bool:
        """One sample of each kind that is not yet firm, in any order; False when none was taken."""
        unsettled = [samples for samples in kinds if not samples.is_firm]
        self._rng.shuffle(unsettled)
        taken = False
        for samples in unsettled:
            if self._clock() + self._expected_s(samples.num_tokens) <= until:
                self._sample(samples)
                taken = True
        return taken

    def _sample(self, samples: Samples) -> None:
        kind = samples.num_tokens, samples.num_sequences
        times = [self.call_s(*kind) for _ in range(self._run)]
        samples.seconds.append(fmean(times[2:]) if self._run > 1 else times[0])
        if self._run > 1 and kind != self._last:
            samples.switched_s.append(times[0])
        self._last = kind
        self._report()

    def _report(self) -> None:
        self._progress(min((self._clock() - self._started) / max(self._seconds, 1e-9), 1.0))

    def _expected_s(self, num_tokens: int) -> float:
        """What such a call, or a run of them, may take, by the nearest size that was sampled and in
        proportion."""
        sampled = [s for s in self._single if s.seconds]
        near = min(sampled, key=lambda s: abs(s.num_tokens - num_tokens))
        return self._run * near.median_s * max(1.0, num_tokens / near.num_tokens)


# The same calls on several models in turn: which way of loading one is the faster.

SIDE_SIZES = (1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Single tokens three times as often: a difference of 2 % must show."""
FEW_SIDE_SIZES = (1, 1, 2, 4, 8, 16)
"""For a choice between libraries, whose calls differ by more."""
READ_TOKENS = 32
"""of a prompt, read once by each model: as many at once take no longer a token"""
_FILL_SHARE = 0.3
_MAX_SIDE_ROUNDS = 30
"""of which each has three single tokens: enough for any difference that matters"""


def measure_side_by_side(
    models: Sequence[Model],
    *,
    seconds: float,
    rows: Rows = "all",
    context: int = 0,
    sizes: Sequence[int] = SIDE_SIZES,
    pause_s: float = 0.0,
    clock: Clock = perf_counter,
    progress: Progress = lambda _part: None,
) -> list[CallCosts]:
    """The curve of each model, from rounds in which each makes the same calls, in shuffled order.

    First each reads a piece of a prompt.
    `sizes` are the tokens of each call of a round; one that comes twice is measured twice as often.
    `pause_s` lies before every call: threads of another library than the one that is called next spin on
    for a moment. It takes about `seconds` in all, at least a round and at most as many as are of use. The
    calls are made at a context of `context` tokens, or what three tenths of the time can fill. The models'
    sequences are empty before and after.

    Raises BackendError when a call fails.
    """
    rng = random.Random(0)
    timers = [CallTimer(model, rows, clock, random.Random(0)) for model in models]
    sizes = [size for size in sizes if all(size <= timer.largest for timer in timers)]
    context = min(context, *(model.context_length - max(sizes) for model in models))
    taken = [{size: Samples(size) for size in sizes} for _ in models]
    started = clock()
    with ExitStack() as stack:
        for timer in timers:
            stack.enter_context(timer)
        read_s = [timer.fill(READ_TOKENS) for timer in timers]
        for timer in timers:
            timer.clear()
        while timers[0].stored() < context and clock() - started < _FILL_SHARE * seconds:
            for timer in timers:
                timer.fill(context - timer.stored())
        num_rounds, first_s = 0, clock()
        while num_rounds == 0 or (
            num_rounds < _MAX_SIDE_ROUNDS and clock() - started + (clock() - first_s) / num_rounds <= seconds
        ):
            for size in rng.sample(sizes, len(sizes)):
                for i in rng.sample(range(len(models)), len(models)):
                    sleep(pause_s)
                    taken[i][size].seconds.append(timers[i].call_s(size))
                progress(min((clock() - started) / max(seconds, 1e-9), 1.0))
            num_rounds += 1
    return [
        CallCosts([samples.point() for samples in kinds.values()], prefill_token_s=seconds or None)
        for kinds, seconds in zip(taken, read_s, strict=True)
    ]
