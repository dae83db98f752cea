"""What taking rejected drafts back costs a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from time import perf_counter

from outrider.check.report import Rewind
from outrider.core.contracts import Model
from outrider.core.data import Span

_TEXT_TOKENS = 64
_REJECTED_TOKENS = 3
_ROUNDS = 7


def measure_rewind(model: Model, text: Sequence[int], *, clock: Callable[[], float] = perf_counter) -> Rewind:
    """Time calls over a single token, with and without a few tokens taken back before them.

    Uses sequence 0 and leaves it empty. Raises BackendError when a call fails.
    """
    size = min(_TEXT_TOKENS, model.context_length - 2 * _ROUNDS, model.max_batch_tokens)
    # A short text again and again: each round takes a token away.
    tokens = tuple(islice(cycle(text), max(size, 0)))
    if model.rewind == "none" or len(tokens) < _REJECTED_TOKENS + _ROUNDS:
        return Rewind(model.rewind, None, None)
    model.truncate(0, 0)
    try:
        model.decode([Span(0, tokens, 0, 1)])
        onward_s, back_s = [], []
        for _ in range(_ROUNDS):
            onward_s.append(_timed(model, tokens[-1], 0, clock))
            back_s.append(_timed(model, tokens[-1], _REJECTED_TOKENS, clock))
    finally:
        model.truncate(0, 0)
    return Rewind(model.rewind, median(onward_s), median(back_s))


def _timed(model: Model, token: int, back: int, clock: Callable[[], float]) -> float:
    started = clock()
    length = model.length(0) - back
    if back:
        model.truncate(0, length)
    model.decode([Span(0, (token,), length, 1)])
    return clock() - started
