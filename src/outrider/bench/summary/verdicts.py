"""Faster, slower or a tie, for many cells at once: the more are looked at, the more each has to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.results import Cell, Results
from outrider.bench.settings import PLAIN
from outrider.bench.statistics import LEVEL, Interval, estimate
from outrider.bench.summary.rates import paired, plain_cell
from outrider.bench.summary.speed import Outcome, noise, outcome
from outrider.certify.statistics import holm

__all__ = ["CellVerdict", "measured_cells", "verdicts"]


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """A measured speed-up, and what it amounts to among all the cells that were looked at with it."""

    cell: Cell
    speedup: Interval
    noise: Interval | None
    p_value: float
    outcome: Outcome


def measured_cells(results: Results) -> list[Cell]:
    """Everything that ran for real, plain decoding apart, by workload."""
    return [cell for cell in results.runs_by_cell if cell != plain_cell(cell.target, cell.workload)]


def verdicts(results: Results, cells: Sequence[Cell] | None = None) -> list[CellVerdict]:
    """The verdicts of these cells, or of all that were measured; cells that did not run are left out.

    "faster" and "slower" are said only of cells that Holm's procedure picks from all of them together: the
    chance that any of a table is wrong is at most 5 %.
    """
    wanted = measured_cells(results) if cells is None else [c for c in cells if c.setting != PLAIN.name]
    found = []
    for cell in wanted:
        if strata := paired(results, cell, plain_cell(cell.target, cell.workload)):
            found.append((cell, estimate(strata)))
    picked = holm([estimated.p_value for _, estimated in found], 1 - LEVEL)
    told = []
    for (cell, estimated), is_picked in zip(found, picked, strict=True):
        own_noise = noise(results, cell.target, cell.workload)
        said = outcome(estimated.interval, own_noise) if is_picked else "tie"
        told.append(CellVerdict(cell, estimated.interval, own_noise, estimated.p_value, said))
    return told
