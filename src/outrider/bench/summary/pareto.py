"""Speed against memory: which pairings nothing else beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.bench.results import Cell, Results
from outrider.bench.summary.counts import Quality, memory_bytes, quality_of
from outrider.bench.summary.predictions import predicted_speedup
from outrider.bench.summary.speeds import best_setting, measured_speed, plain_speed
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import Interval


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A target alone, with lookup, or with a draft, at its best setting."""

    cell: Cell
    tokens_per_s: Interval
    is_measured: bool
    """else it is plain decoding's measured speed times the replayed speed-up"""
    memory_bytes: int
    quality: Quality | None
    is_dominated: bool = False
    """another point is as fast or faster in no more memory, and better in one. Quality is not weighed"""


def pareto_points(results: Results, workload: str | None = None) -> list[ParetoPoint]:
    """Every target plainly, with its best setting without a draft model, and with each draft. Pairings whose
    speed or memory is unknown are left out."""
    found = []
    for target in results.targets:
        cells = [Cell.plain_of(target, workload)]
        for draft in (None, *results.drafts):
            cells.append(Cell(target, draft, best_setting(results, target, draft, workload), workload))
        kept = [cell for cell in dict.fromkeys(cells) if cell == cells[0] or cell.setting != PLAIN.name]
        found += [point for cell in kept if (point := _point(results, cell)) is not None]
    return [replace(point, is_dominated=_is_dominated(point, found)) for point in found]


def _point(results: Results, cell: Cell) -> ParetoPoint | None:
    speed = measured_speed(results, cell)
    memory = memory_bytes(results, cell.target, cell.draft)
    is_measured = speed is not None
    if speed is None:
        plain = plain_speed(results, cell.target, cell.workload)
        gain = predicted_speedup(results, cell)
        if plain is not None and gain is not None:
            ends = (plain.value * gain.low, plain.value * gain.high)
            speed = Interval(plain.value * gain.value, *ends, gain.cases)
    if speed is None or memory is None:
        return None
    return ParetoPoint(cell, speed, is_measured, memory, quality_of(results, cell.target))


def _is_dominated(point: ParetoPoint, others: Sequence[ParetoPoint]) -> bool:
    mine = (point.tokens_per_s.value, -point.memory_bytes)
    theirs = [(other.tokens_per_s.value, -other.memory_bytes) for other in others]
    return any(speed >= mine[0] and memory >= mine[1] and (speed, memory) != mine for speed, memory in theirs)
