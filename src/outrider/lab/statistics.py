"""Intervals and p-values of speed-ups: bootstrap over cases and, within each, over repetitions.

docs/method.md says what is done and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from outrider.core.numbers import Interval

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
DRAWS = 2_000
_SEED = 20_260
_REPETITION_DRAWS = 400
"""Draws of each case's repetitions, from which every draw of cases takes one at random."""
_MAX_SPLITS = 500


Strata = Sequence[Sequence[tuple[Floats, Floats]]]
"""Groups of cases that count the same, workloads; of each case the seconds per token of two settings, shape
(repetitions,) each, in the same blocks. The figure is first over second."""


def estimate(strata: Strata) -> Interval:
    """Of each case the ratio of medians; over the cases of a group, then over groups, the geometric mean.

    Each draw resamples cases within their group, and within each case its repetitions, the same for both
    settings.
    """
    rng = np.random.default_rng(_SEED)
    logs = [np.log([np.median(first) / np.median(second) for first, second in group]) for group in strata]
    value = float(np.mean([group.mean() for group in logs]))
    drawn = np.mean([_draws(group, rng) for group in strata], axis=0)
    num_cases = sum(map(len, strata))
    repetitions = min(len(first) for group in strata for first, _ in group)
    # What is drawn are cases, or repetitions where the cases are single. Drawing again and again
    # understates their spread.
    by_cases = num_cases > len(strata)
    degrees = num_cases - len(strata) if by_cases else repetitions - 1
    stretch = math.sqrt((num_cases if by_cases else repetitions) / max(degrees, 1))
    low, high = drawn.min(), drawn.max()
    if degrees > 0:
        # The level is raised as a t-interval is wider than a normal one (Hesterberg 2015): plain percentiles
        # of few cases are too narrow.
        tail = NormalDist().cdf(-t_quantile(degrees) * stretch)
        low, high = np.quantile(drawn, [tail, 1 - tail])
    # An interval always holds its figure: medians of few repetitions can be lopsided.
    ends = math.exp(min(float(low), value)), math.exp(max(float(high), value))
    return Interval(math.exp(value), *ends, num_cases if by_cases else 1, repetitions)


def _draws(cases: Sequence[tuple[Floats, Floats]], rng: np.random.Generator) -> Floats:
    """Means over one group's cases of log ratios, each of medians over repetitions drawn again; shape
    (draws,)."""
    resampled = np.empty((len(cases), _REPETITION_DRAWS))
    for ratios, (first, second) in zip(resampled, cases, strict=True):
        chosen = rng.integers(len(first), size=(_REPETITION_DRAWS, len(first)))
        ratios[:] = np.log(np.median(first[chosen], axis=1) / np.median(second[chosen], axis=1))
    shape = (DRAWS, len(cases))
    drawn = rng.integers(len(cases), size=shape)
    means: Floats = resampled[drawn, rng.integers(_REPETITION_DRAWS, size=shape)].mean(axis=1)
    return means


def self_ratio(strata: Sequence[Sequence[Floats]]) -> Interval | None:
    """Plain decoding against itself: ratios between disjoint halves of the repetitions, over all ways to part
    them. None where nothing ran twice. Halves have fewer repetitions than a result, so it is rather wide.

    `strata` holds the seconds per token of each case, shape (repetitions,), by group.
    """
    repetitions = min((len(case) for cases in strata for case in cases), default=0)
    if repetitions < 2:
        return None
    everything = range(min(repetitions, 12))
    half = len(everything) // 2
    splits = [
        (first, second)
        for first in combinations(everything, half)
        for second in combinations([r for r in everything if r not in first], half)
    ]
    splits = splits[:: max(1, math.ceil(len(splits) / _MAX_SPLITS))]  # evenly spread over them
    first, second = np.array([split[0] for split in splits]), np.array([split[1] for split in splits])
    groups = []
    for cases in strata:
        rates = np.array([case[:repetitions] for case in cases])
        log_ratios = np.log(np.median(rates[:, first], axis=-1) / np.median(rates[:, second], axis=-1))
        groups.append(log_ratios.mean(axis=0))
    ratios = np.mean(groups, axis=0)
    edge = float(np.quantile(np.abs(ratios), LEVEL))
    return Interval(1.0, math.exp(-edge), math.exp(edge), sum(map(len, strata)), repetitions)


def t_tail(statistic: float, degrees: int) -> float:
    """The two-sided tail of Student's t for a whole number of degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan(statistic / math.sqrt(degrees))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term, total = 1.0, 0.0
    start = degrees % 2
    for i in range(start, degrees - 1, 2):
        total += term
        term *= square * (i + 1) / (i + 2)
    inside = 2 / math.pi * (angle + sine * math.cos(angle) * total) if start else sine * total
    return min(max(1 - inside, 1e-15), 1.0)


@cache
def t_quantile(degrees: int) -> float:
    """The statistic whose two-sided tail is 1 - LEVEL."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - LEVEL else (low, middle)
    return high


def holm(p_values: Sequence[float], significance: float) -> list[bool]:
    """Which hypotheses Holm's step-down procedure (1979) rejects: the chance that any true one is
    among them is at most `significance`, however the tests depend on each other."""
    rejected = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] > significance / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)


def speedup_of(slow_s: Sequence[float], fast_s: Sequence[float], *, error: float = 0.0) -> Interval:
    """The geometric mean of the answers' ratios, first over second. `error` is a relative standard error that
    all answers share, that of measured costs. A single answer has an interval without ends: 0 to infinity."""
    cases = [(np.array([slow]), np.array([fast])) for slow, fast in zip(slow_s, fast_s, strict=True)]
    found = estimate([cases])
    if len(cases) < 2:
        return Interval(found.value, 0.0, math.inf, 1)
    below, above = math.log(found.value / found.low), math.log(found.high / found.value)
    low, high = (math.exp(math.hypot(width, _NORMAL * error)) for width in (below, above))
    return Interval(found.value, found.value / low, found.value * high, len(cases))
