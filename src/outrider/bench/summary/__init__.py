"""The figures that every view of a sweep shows: worked out here, once; views only format them.

A request's rate is seconds per token while decoding: the draft model's reading of the prompt counts, the
target's does not. docs/method.md says what each figure is over. None always means: not run, or not known.
"""

from outrider.bench.summary.account import TimeAccount, time_saved
from outrider.bench.summary.counts import (
    Acceptance,
    Hiccups,
    Quality,
    TimeShares,
    acceptance_by_position,
    hiccups,
    memory_bytes,
    memory_is_measured,
    quality_of,
    time_shares,
    tokens_per_target_call,
)
from outrider.bench.summary.libraries import faster_than
from outrider.bench.summary.pareto import ParetoPoint, pareto
from outrider.bench.summary.prediction import (
    ErrorFigures,
    PredictedPoint,
    PredictionError,
    bound_share,
    bound_speedup,
    predicted_speedup,
    prediction_error,
)
from outrider.bench.summary.speed import (
    Outcome,
    best_setting,
    contestants,
    measured_settings,
    measured_speed,
    measured_speedup,
    noise,
    outcome,
    plain_speed,
    predicted_settings,
)
from outrider.bench.summary.verdicts import CellVerdict, measured_cells, verdicts
from outrider.lab.statistics import Interval

__all__ = [
    "Acceptance",
    "CellVerdict",
    "ErrorFigures",
    "Hiccups",
    "Interval",
    "Outcome",
    "ParetoPoint",
    "PredictedPoint",
    "PredictionError",
    "Quality",
    "TimeAccount",
    "TimeShares",
    "acceptance_by_position",
    "best_setting",
    "bound_share",
    "bound_speedup",
    "contestants",
    "faster_than",
    "hiccups",
    "measured_cells",
    "measured_settings",
    "measured_speed",
    "measured_speedup",
    "memory_bytes",
    "memory_is_measured",
    "noise",
    "outcome",
    "pareto",
    "plain_speed",
    "predicted_settings",
    "predicted_speedup",
    "prediction_error",
    "quality_of",
    "time_saved",
    "time_shares",
    "tokens_per_target_call",
    "verdicts",
]
