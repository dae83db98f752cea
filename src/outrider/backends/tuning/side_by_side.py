"""The same calls on several models in turn: which way of loading one is the faster."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter, sleep

from outrider.core.contracts import Model
from outrider.costs import CallCosts
from outrider.costs.calibrate import CallTimer, Clock, Progress, Rows, Samples

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

    First each reads a piece of a prompt. `sizes` are the tokens of each call of a round; one that comes twice
    is measured twice as often. `pause_s` lies before every call: threads of another library spin on for a
    moment. It takes about `seconds` in all, at least a round. The calls are made at a context of `context`
    tokens, or what three tenths of the time can fill. The models' sequences are empty before and after.
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
