"""What replay said."""

from __future__ import annotations

import numpy as np

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Cell, Results, once
from outrider.lab.rows import PredictionRow
from outrider.lab.statistics import estimate


@once
def predicted_speedup(results: Results, cell: Cell) -> Interval | None:
    """Replayed plain decoding's time over the setting's; over cases (and then workloads) the geometric mean.
    The interval is over cases; that costs were measured with an error is not in it."""
    strata = [
        [(np.array([case.plain_s]), np.array([case.seconds])) for case in row.cases if case.seconds > 0]
        for row in _rows(results, cell)
    ]
    return estimate(strata).interval if strata and all(strata) else None


def _rows(results: Results, cell: Cell) -> list[PredictionRow]:
    """The predictions of a cell, one a workload; none where one of several is missing."""
    replayed = {row.workload for row in results.predictions if row.target == cell.target}
    names = (
        [name for name in results.workloads if name in replayed] if cell.workload is None else [cell.workload]
    )
    found = [results.prediction_by_cell.get(cell._replace(workload=name)) for name in names]
    return [row for row in found if row is not None] if all(found) else []
