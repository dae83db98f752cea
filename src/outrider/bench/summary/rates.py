"""Requests that ran for real as seconds per token, by case and block: what speeds are worked out from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from outrider.bench.results import Cell, Results
from outrider.lab.settings import PLAIN

__all__ = ["paired", "plain_cell", "rates", "workloads_of"]

Floats = npt.NDArray[np.float64]


def plain_cell(target: str, workload: str | None) -> Cell:
    """Plain decoding of a target."""
    return Cell(target, None, PLAIN.name, workload)


def rates(results: Results, cell: Cell) -> Mapping[str, Mapping[str, float]]:
    """Seconds per token by case and block, of a cell with one workload. Requests that timed no token count
    for nothing."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in results.runs_by_cell.get(cell, ()):
        if row.timed_tokens > 0 and row.decode_s > 0:
            found[row.case][row.block] = row.decode_s / row.timed_tokens
    return found


def workloads_of(results: Results, cell: Cell) -> list[str] | None:
    """The workloads that a cell is over. A figure over all of them is over all that the target decoded
    plainly: None where the cell did not run in each, for a mean over others would not compare with it."""
    if cell.workload is not None:
        return [cell.workload]
    ran = [name for name in results.workloads if plain_cell(cell.target, name) in results.runs_by_cell]
    has_all = all(cell._replace(workload=name) in results.runs_by_cell for name in ran)
    return ran if ran and has_all else None


def paired(results: Results, cell: Cell, reference: Cell) -> list[list[tuple[Floats, Floats]]] | None:
    """By workload and case the rates of reference and cell in the blocks that have both, as `estimate` takes
    them. None where they share none in one of the workloads."""
    workloads = workloads_of(results, cell)
    strata = []
    for workload in workloads or ():
        ours = rates(results, cell._replace(workload=workload))
        theirs = rates(results, reference._replace(workload=workload))
        cases = [_shared(theirs[case], ours[case]) for case in ours if case in theirs]
        if not (cases := [case for case in cases if len(case[0])]):
            return None
        strata.append(cases)
    return strata or None


def _shared(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[Floats, Floats]:
    blocks = [block for block in first if block in second]
    return np.array([first[block] for block in blocks]), np.array([second[block] for block in blocks])
