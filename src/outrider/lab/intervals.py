"""Figures over a few answers, and how far they tell about other prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from outrider.lab.statistics import DRAWS, LEVEL, Interval, estimate

__all__ = ["Interval", "share_of", "speedup_of"]

_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)


def speedup_of(slow_s: Sequence[float], fast_s: Sequence[float], *, error: float = 0.0) -> Interval:
    """The geometric mean of the answers' ratios, first over second. `error` is a relative standard error that
    all answers share, that of measured costs. A single answer has an interval without ends: 0 to infinity."""
    cases = [(np.array([slow]), np.array([fast])) for slow, fast in zip(slow_s, fast_s, strict=True)]
    found = estimate([cases]).interval
    if len(cases) < 2:
        return Interval(found.value, 0.0, math.inf, 1)
    below, above = math.log(found.value / found.low), math.log(found.high / found.value)
    low, high = (math.exp(math.hypot(width, _NORMAL * error)) for width in (below, above))
    return Interval(found.value, found.value / low, found.value * high, len(cases))


def share_of(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """Sum over sum, a share of 0 to 1, with the percentiles of answers drawn anew; 0 to 1 for a single
    answer."""
    some, all_ = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    value, count = float(some.sum() / all_.sum()), len(some)
    if count < 2:
        return Interval(value, 0.0, 1.0, count)
    drawn = np.random.default_rng(0).integers(0, count, (DRAWS, count))
    wholes_drawn = all_[drawn].sum(axis=1)
    counted = wholes_drawn > 0  # a draw of answers that hold nothing has no share
    ratios = some[drawn].sum(axis=1)[counted] / wholes_drawn[counted]
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(value, float(low), float(high), count)
