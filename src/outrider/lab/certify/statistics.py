"""Do counts follow a distribution that is known exactly? Chi-square, with its null simulated.

Nothing relies on an asymptotic law: the statistic's distribution under the null comes from
multinomial draws, so a p-value holds for small counts, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Probs = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled: a single stray there would decide the statistic."""

_CHUNK = 10_000
_NORMAL_95 = 1.645
"""what a normal variable stays below with that probability"""


def pool(probs: Probs, num_samples: int) -> npt.NDArray[np.int64]:
    """The pooled cell of each cell: those with an expected count below `MIN_EXPECTED` share the
    last one, joined by the least likely of the others while it is still too small itself."""
    order = np.argsort(-probs, kind="stable")
    num_kept = int((probs * num_samples >= MIN_EXPECTED).sum())
    while 0 < num_kept < len(probs) and probs[order[num_kept:]].sum() * num_samples < MIN_EXPECTED:
        num_kept -= 1
    groups = np.full(len(probs), num_kept, dtype=np.int64)
    groups[order[:num_kept]] = np.arange(num_kept)
    return groups


@dataclass(frozen=True, slots=True)
class Null:
    """A known distribution over pooled cells, and the sorted statistics of samples drawn from it.

    `statistics` are those of multinomials of `num_samples` each.
    """

    probs: Probs
    num_samples: int
    statistics: Probs

    def statistic(self, counts: Counts) -> float:
        """Σ (observed - expected)² / expected over the cells."""
        return float(_chi_square(counts[None, :], self.probs, self.num_samples)[0])

    def p_value(self, statistic: float) -> float:
        """(1 + #{null statistics >= this one}) / (1 + #null statistics): never below the truth."""
        above = len(self.statistics) - int(np.searchsorted(self.statistics, statistic, side="left"))
        return (1 + above) / (1 + len(self.statistics))


def simulate_null(probs: Probs, num_samples: int, num_draws: int, rng: np.random.Generator) -> Null:
    """Draw the null distribution of the statistic."""
    probs = probs / probs.sum()
    statistics = []
    for start in range(0, num_draws, _CHUNK):
        draws = rng.multinomial(num_samples, probs, size=min(_CHUNK, num_draws - start))
        statistics.append(_chi_square(draws, probs, num_samples))
    return Null(probs, num_samples, np.sort(np.concatenate(statistics)))


def _chi_square(counts: Counts, probs: Probs, num_samples: int) -> Probs:
    expected = probs * num_samples
    statistics: Probs = ((counts - expected) ** 2 / expected).sum(axis=1)
    # Equal counts in another order must not differ in the last bits: p-values count ties.
    return np.round(statistics, 9)


# A test against one kind of error, over outcomes of many laws at once

ERRORS = (0.0, -0.01, 0.01, -0.03, 0.03, -0.1, 0.1, -0.3, 0.3)
"""The errors under which a law is known: none, then pairs; the first pair gives the direction."""

_MAX_SCORE = 20.0
"""Scores are cut there: a rare outcome must not decide alone."""
_STEEPNESS = np.array([*np.arange(0.5, 9, 0.5), 10, 12, 16, 24, 36])
"""In standard deviations: at which exponents the bound on the tail is tried."""


class ScoreTest:
    """Do outcomes, each of a known law, deviate from their laws as an error of a known kind would make them?

    The score of an outcome is by how much an error changes the logarithm of its probability, per unit of
    error; their sum is compared with its bound under the laws (Chernoff's, which holds for any number
    of outcomes). An outcome that its law rules out decides at once.
    """

    def __init__(self) -> None:
        self.outcomes = 0
        self.impossible = 0
        self._sum = self._variance = 0.0
        self._shifts = np.zeros(len(ERRORS))
        self._laws: list[tuple[int, Probs, Probs]] = []

    def add(self, laws: Sequence[Probs], counts: Counts, impossible: int = 0) -> None:
        """Add outcomes of one law: `laws` are their probabilities under each of `ERRORS`, `counts` how often
        each was seen; `impossible` others were."""
        law = laws[0]
        possible = law > 0
        self.outcomes += int(counts.sum()) + impossible
        self.impossible += int(counts[~possible].sum()) + impossible
        law, counts = law[possible], counts[possible]
        others = np.array([other[possible] for other in laws])
        scores = np.clip((others[2] - others[1]) / (ERRORS[2] - ERRORS[1]) / law, -_MAX_SCORE, _MAX_SCORE)
        scores -= law @ scores
        variance, count = float(law @ scores**2), int(counts.sum())
        if variance < 1e-12 or not count:
            return
        self._sum += float(counts @ scores)
        self._variance += count * variance
        self._shifts += count * (others @ scores)
        self._laws.append((count, law, scores))

    @property
    def statistic(self) -> float | None:
        """The sum of scores in standard deviations; None where an outcome was impossible, or none tells."""
        return None if self.impossible or not self._laws else self._sum / math.sqrt(self._variance)

    def p_value(self) -> float:
        """At least the probability of a sum so far from 0; 0 where an outcome was impossible."""
        if self.impossible or not self._laws:
            return 0.0 if self.impossible else 1.0
        exponents, cumulants = self._cumulants(math.copysign(1.0, self._sum))
        return min(1.0, 2 * math.exp(min(0.0, float((cumulants - exponents * abs(self._sum)).min()))))

    def detectable_error(self, level: float) -> float | None:
        """The smallest error that is found with probability 0.95 at this level, whatever its sign, worked
        out from the laws of these outcomes; None where none up to 0.3 is."""
        if not self._laws:
            return None
        found = []
        for sign, shifts in ((1.0, self._shifts[2::2]), (-1.0, -self._shifts[1::2])):
            exponents, cumulants = self._cumulants(sign)
            critical = float(((cumulants + math.log(2 / level)) / exponents).min())
            wanted = critical + _NORMAL_95 * math.sqrt(self._variance)
            shifts = np.maximum.accumulate([0.0, *shifts])
            if shifts[-1] < wanted:
                return None
            found.append(float(np.interp(wanted, shifts, [0.0, *ERRORS[2::2]])))
        return max(found)

    def _cumulants(self, sign: float) -> tuple[Probs, Probs]:
        """Exponents, and the logarithm of the moment generating function of the sum (or its negative)."""
        exponents: Probs = _STEEPNESS / math.sqrt(self._variance)
        counts = np.array([count for count, _, _ in self._laws])
        probs = np.concatenate([law for _, law, _ in self._laws])
        scores = sign * np.concatenate([scores for _, _, scores in self._laws])
        starts = np.cumsum([0, *(len(law) for _, law, _ in self._laws[:-1])])
        with np.errstate(over="ignore"):  # an infinite bound is none
            moments = (np.add.reduceat(probs * np.exp(e * scores), starts) for e in exponents)
            return exponents, np.array([counts @ np.log(moment) for moment in moments])
