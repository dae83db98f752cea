"""One file under several native libraries: how much faster one cell is than that of another target."""

from __future__ import annotations

import math

import numpy as np

from outrider.bench.results import Cell, Results
from outrider.bench.summary.rates import rates, workloads_of
from outrider.bench.summary.speed import Outcome, noise, outcome
from outrider.lab.statistics import Interval, estimate

__all__ = ["faster_than"]


def faster_than(results: Results, ours: Cell, theirs: Cell) -> tuple[Interval, Outcome] | None:
    """The tokens per second of one cell over those of another, over the cases that both have, and whether
    that is beyond the noise of both. They need not have run in the same blocks. None where they share no
    case."""
    strata = []
    for workload in workloads_of(results, ours) or ():
        mine, other = (rates(results, cell._replace(workload=workload)) for cell in (ours, theirs))
        cases = [
            (np.array([*other[case].values()]), np.array([*mine[case].values()]))
            for case in mine
            if case in other
        ]
        if not cases:
            return None
        strata.append(cases)
    if not strata:
        return None
    found = estimate(strata, paired=False).interval
    return found, outcome(found, _noise(results, ours, theirs))


def _noise(results: Results, *cells: Cell) -> Interval | None:
    """Of both targets together."""
    known = [noise(results, cell.target, cell.workload) for cell in cells]
    sizes = [math.log(interval.high) for interval in known if interval is not None]
    size = math.hypot(*sizes)
    return Interval(1.0, math.exp(-size), math.exp(size)) if sizes else None
