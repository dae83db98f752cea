"""What replay said, how far hindsight could have come, and how well both met what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import numpy as np

from outrider.lab.bench.results import Cell, Results, once, rates
from outrider.lab.rows import PredictionRow
from outrider.lab.statistics import Floats, Interval, estimate


@dataclass(frozen=True, slots=True)
class PredictedPoint:
    """A setting that was replayed and run, in tokens per second over the cases that have both."""

    cell: Cell
    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    anchored_tokens_per_s: float | None
    """the prediction, corrected by what plain decoding took against its own; None where it did not run"""

    @property
    def raw_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1

    @property
    def anchored_error(self) -> float | None:
        """The same of the anchored prediction: the error of the predicted speed-up."""
        anchored = self.anchored_tokens_per_s
        return None if anchored is None else anchored / self.measured_tokens_per_s - 1


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Over `settings` errors: the median of their sizes, and shares that are small."""

    settings: int
    median_error: float
    within_5_ratio: float
    within_10_ratio: float


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Prediction against measurement, for every setting, pair and workload that has both; None: none has."""

    raw: ErrorFigures | None
    anchored: ErrorFigures | None
    points: tuple[PredictedPoint, ...]


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


@once
def prediction_error(results: Results) -> PredictionError:
    """How far predictions were off, for every setting that ran for real."""
    cells = [cell for cell in results.runs_by_cell if not cell.is_plain]
    points = tuple(point for cell in cells if (point := _point(results, cell)) is not None)
    anchored = [error for point in points if (error := point.anchored_error) is not None]
    return PredictionError(_figures([point.raw_error for point in points]), _figures(anchored), points)


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


def _point(results: Results, cell: Cell) -> PredictedPoint | None:
    row = results.prediction_by_cell.get(cell)
    ran, plain = rates(results, cell), rates(results, cell.plain)
    replayed = row.cases if row else ()
    cases = [case for case in replayed if case.case in ran and case.tokens and case.seconds > 0]
    if not cases:
        return None
    measured = 1 / geometric_mean(median(ran[case.case].values()) for case in cases)
    predicted = geometric_mean(case.tokens / case.seconds for case in cases)
    anchored = None
    if all(plain.get(case.case) for case in cases):
        plain_took = geometric_mean(median(plain[case.case].values()) for case in cases)
        anchored = predicted * geometric_mean(case.plain_s / case.tokens for case in cases) / plain_took
    return PredictedPoint(cell, measured, predicted, anchored)


def _figures(errors: Sequence[float]) -> ErrorFigures | None:
    if not errors:
        return None
    sizes = np.abs(errors)
    within_5, within_10 = float((sizes <= 0.05).mean()), float((sizes <= 0.1).mean())
    return ErrorFigures(len(errors), float(np.median(sizes)), within_5, within_10)
