"""Do two sets of texts come from one distribution? Chi-square over both, with its null by permutation.

If they do, every way to part the texts into two sets of these sizes is equally likely, whatever the
distribution. So the p-value holds for any number of texts, and a test at level a raises a false alarm with
probability a at most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_COUNT = 10
"""Texts that both sets together hold less often share a cell."""

_CHUNK = 2_000


@dataclass(frozen=True, slots=True)
class TwoSamples:
    """`statistic`: chi-square over `cells`; `distance`: total variation between the two sets' shares of the
    cells; `chance_distance`: what that is in the mean where nothing differs."""

    cells: int
    statistic: float
    p_value: float
    distance: float
    chance_distance: float


def two_samples(
    first: Counter[Any], second: Counter[Any], draws: int, random: np.random.Generator
) -> TwoSamples:
    """Compare the counts of two sets of texts, neither of them empty."""
    counts = _cells(first, second)
    totals, size = counts.sum(axis=0), int(counts[0].sum())
    statistic, distance = (values[0] for values in _measure(counts[:1], totals))
    statistics, distances = [], []
    for start in range(0, draws, _CHUNK):
        parted = random.multivariate_hypergeometric(
            totals, size, size=min(_CHUNK, draws - start), method="marginals"
        )
        found = _measure(parted, totals)
        statistics.append(found[0])
        distances.append(found[1])
    above = int((np.concatenate(statistics) >= statistic).sum())
    p_value = (1 + above) / (1 + draws)
    return TwoSamples(
        len(totals), float(statistic), p_value, float(distance), float(np.concatenate(distances).mean())
    )


def _cells(first: Counter[Any], second: Counter[Any]) -> npt.NDArray[np.int64]:
    """Counts (2, cells): rare texts share the last cell."""
    common = [text for text in first | second if first[text] + second[text] >= MIN_COUNT]
    rows = []
    for counter in (first, second):
        own = [counter[text] for text in common]
        rows.append([*own, counter.total() - sum(own)])
    counts = np.array(rows, dtype=np.int64)
    return counts[:, counts.sum(axis=0) > 0]


def _measure(
    firsts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Chi-square and total variation of each partition (partitions, cells)."""
    size, whole = firsts.sum(axis=1, keepdims=True), totals.sum()
    seconds = totals - firsts
    expected = totals * size / whole
    rest = totals - expected
    gaps = (firsts - expected) ** 2
    # Equal partitions must not differ in the last bits: p-values count ties.
    statistics = np.round((gaps / expected + gaps / rest).sum(axis=1), 9)
    distances = np.abs(firsts / size - seconds / (whole - size)).sum(axis=1) / 2
    return statistics, distances
