"""Faster, slower or a tie, for many cells at once: the more are looked at, the more each has to show.

How much a figure would differ if the same prompts were run again is known best from all cells of a target
together: a single cell has few repetitions, all of them have hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.results import Cell, Results
from outrider.bench.summary.speeds import Outcome, noise, outcome, paired
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import LEVEL, Interval, Strata, estimate, holm, t_tail


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """A measured speed-up, and what it amounts to among all the cells that were looked at with it.

    `speedup`'s interval is about other prompts of this kind, `p_value` about these: how often noise alone
    would show as much.
    """

    cell: Cell
    speedup: Interval
    noise: Interval | None
    p_value: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _Repeatability:
    """The standard deviation of a log speed-up from block to block, and the degrees of freedom that it was
    worked out from."""

    deviation: float
    degrees: int

    def p_value(self, strata: Strata, speedup: float) -> float:
        """How often noise would move a figure over these requests so far from 1."""
        if self.degrees < 1 or self.deviation <= 0:
            return 1.0
        groups = [sum(1 / len(first) for first, _ in cases) / len(cases) ** 2 for cases in strata]
        error = self.deviation * math.sqrt(sum(groups)) / len(groups)
        return t_tail(abs(math.log(speedup)) / error, min(self.degrees, _MAX_DEGREES))


_MAX_DEGREES = 400
"""beyond them nothing changes"""


def measured_cells(results: Results) -> list[Cell]:
    """Everything that ran for real, plain decoding apart, by workload."""
    return [cell for cell in results.runs_by_cell if not cell.is_plain]


def verdicts(results: Results, cells: Sequence[Cell] | None = None) -> list[CellVerdict]:
    """The verdicts of these cells, or of all that were measured; cells that did not run are left out.

    "faster" and "slower" are said only of cells that Holm's procedure picks from all of them together (the
    chance that noise made any of them is at most 5 %) and whose interval does not hold 1.
    """
    wanted = measured_cells(results) if cells is None else [c for c in cells if c.setting != PLAIN.name]
    repeated = {target: _repeatability(results, target) for target in results.targets}
    found = []
    for cell in wanted:
        if strata := paired(results, cell, cell.plain):
            speedup = estimate(strata).interval
            found.append((cell, speedup, repeated[cell.target].p_value(strata, speedup.value)))
    picked = holm([p_value for _, _, p_value in found], 1 - LEVEL)
    judged = []
    for (cell, speedup, p_value), is_picked in zip(found, picked, strict=True):
        own_noise = noise(results, cell.target, cell.workload)
        said = outcome(speedup, own_noise) if is_picked else "tie"
        judged.append(CellVerdict(cell, speedup, own_noise, p_value, said))
    return judged


def _repeatability(results: Results, target: str) -> _Repeatability:
    """Over everything of a target that ran more than once."""
    squares, degrees = 0.0, 0
    for cell in measured_cells(results):
        if cell.target != target:
            continue
        for cases in paired(results, cell, cell.plain) or ():
            for first, second in cases:
                logs = np.log(first / second)
                squares += float(((logs - logs.mean()) ** 2).sum())
                degrees += len(logs) - 1
    return _Repeatability(math.sqrt(squares / degrees) if degrees else 0.0, degrees)
