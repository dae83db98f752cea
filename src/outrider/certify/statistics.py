"""Do counts follow a distribution that is known exactly? Chi-square, with its null simulated.

Nothing relies on an asymptotic law: the statistic's distribution under the null comes from
multinomial draws, so a p-value holds for small counts, too. What the test can find is simulated
as well, against the alternative that it finds hardest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.errors import SettingError

Probs = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled: a single stray there would decide the statistic."""

_CHUNK = 10_000
_POWER_DRAWS = 1_000
_SHIFT_STEP = 0.0025
_WANTED_POWER = 0.95


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

    def power(self, shift: float, level: float, rng: np.random.Generator) -> float:
        """The probability that a shift of this total variation is found at this level.

        The shift is the hardest one to find: mass moves from one half of the distribution to the
        other in proportion to what is there (by Cauchy and Schwarz nothing of the same total
        variation has a smaller noncentrality). 0 where no such shift exists.
        """
        shifted = _shifted(self.probs, shift)
        if shifted is None:
            return 0.0
        # The p-value counts the observed statistic itself, which leaves this many null ones above.
        spare = math.floor(level * (1 + len(self.statistics)) + 1e-9) - 1
        if spare < 0:
            return 0.0
        critical = self.statistics[-1 - spare] if spare < len(self.statistics) else -math.inf
        draws = rng.multinomial(self.num_samples, shifted, size=_POWER_DRAWS)
        return float((_chi_square(draws, self.probs, self.num_samples) > critical).mean())

    def detectable_shift(self, level: float, rng: np.random.Generator) -> float | None:
        """The smallest total variation, in steps of 0.0025, that is found with probability 0.95 or
        more; None where none is."""
        low, high = 0, round(0.5 / _SHIFT_STEP)
        if not self._finds(high, level, rng):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._finds(middle, level, rng) else (middle, high)
        return high * _SHIFT_STEP

    def _finds(self, steps: int, level: float, rng: np.random.Generator) -> bool:
        return self.power(steps * _SHIFT_STEP, level, rng) >= _WANTED_POWER


def simulate_null(probs: Probs, num_samples: int, num_draws: int, rng: np.random.Generator) -> Null:
    """Draw the null distribution of the statistic.

    Raises SettingError for less than one sample or draw.
    """
    if num_samples < 1 or num_draws < 1:
        raise SettingError("samples", f"{min(num_samples, num_draws)} is too few", "Give 1 or more.")
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


def _shifted(probs: Probs, shift: float) -> Probs | None:
    """`probs` with `shift` (0.5 at most) of its mass moved from the greater half to the smaller, in
    proportion; None for a distribution that cannot be halved."""
    gains = np.zeros(len(probs), dtype=bool)
    mass = 0.0
    for i in np.argsort(-probs, kind="stable"):
        if mass + probs[i] <= 0.5:
            gains[i], mass = True, mass + probs[i]
    if mass == 0:
        return None
    return np.where(gains, probs * (1 + shift / mass), probs * (1 - shift / (1 - mass)))
