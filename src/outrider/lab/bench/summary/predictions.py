"""What replay said, and how far hindsight could have come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Cell, Results, once
from outrider.lab.rows import PredictionRow
from outrider.lab.statistics import Floats, estimate


@once
def predicted_speedup(results: Results, cell: Cell) -> Interval | None:
    """Replayed plain decoding's time over the setting's; over cases (and then workloads) the geometric mean.
    The interval is over cases; that costs were measured with an error is not in it."""
    strata = [_ratios(row, [case.seconds for case in row.cases]) for row in _rows(results, cell)]
    return estimate(strata).interval if strata and all(strata) else None


@once
def bound_speedup(results: Results, cell: Cell) -> Interval | None:
    """What the best choice at every step, known in hindsight, would have given with the same drafts; `cell`
    is that of the automatic choice."""
    bounds = [(row, row.bound_s or ()) for row in _rows(results, cell)]
    strata = [_ratios(row, seconds) for row, seconds in bounds if len(seconds) == len(row.cases)]
    return estimate(strata).interval if strata and all(strata) and len(strata) == len(bounds) else None


def _rows(results: Results, cell: Cell) -> list[PredictionRow]:
    """The predictions of a cell, one a workload; none where one of several is missing."""
    replayed = {row.workload for row in results.predictions if row.target == cell.target}
    names = (
        [name for name in results.workloads if name in replayed] if cell.workload is None else [cell.workload]
    )
    found = [results.prediction_by_cell.get(cell._replace(workload=name)) for name in names]
    return [row for row in found if row is not None] if all(found) else []


def _ratios(row: PredictionRow, seconds: Sequence[float]) -> list[tuple[Floats, Floats]]:
    pairs = zip(row.cases, seconds, strict=True)
    return [(np.array([c.plain_s]), np.array([s])) for c, s in pairs if s > 0 and c.plain_s > 0]
