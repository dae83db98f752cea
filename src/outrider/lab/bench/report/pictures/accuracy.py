"""Predicted against measured speed of every setting that ran."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from outrider.lab import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture, series
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, names
from outrider.lab.bench.report.words import prediction_line
from outrider.lab.bench.summary import predictions
from outrider.lab.drawing import INK, SOFT, draw, legend_below

TITLE = "Predicted against measured"
_BANDS = ((0.10, 0.10), (0.05, 0.16))
"""Relative error, and how strongly its band is drawn."""


def accuracy(view: View) -> Picture | Missing:
    """Speeds in tokens per second, the prediction corrected by what plain decoding took, where it ran."""
    found = predictions.prediction_error(view.results)
    if not found.points:
        return Missing(TITLE, "no setting was both predicted and run")
    finding = prediction_line(view)
    svg = draw("accuracy", 520, 440, f"{TITLE}: {finding}", lambda axes: _paint(axes, found.points))
    return Picture(
        id="accuracy",
        title=TITLE,
        finding=finding,
        reading="Each mark is a setting of a pair under a workload, in tokens per second. On the line "
        "the prediction was right; the inner band is ±5 %, the outer one ±10 %. Predictions are "
        "corrected by plain decoding's measured over its predicted time in the same cell, which is the "
        "error of the speed-up.",
        panels=(Panel("all settings that ran", svg, is_broad=True),),
        table=_table(found.points),
    )


def _predicted(point: predictions.PredictedPoint) -> float:
    return point.anchored_tokens_per_s or point.predicted_tokens_per_s


def _paint(axes: Axes, points: tuple[predictions.PredictedPoint, ...]) -> None:
    speeds = [speed for point in points for speed in (_predicted(point), point.measured_tokens_per_s)]
    ends = [min(speeds) / 1.15, max(speeds) * 1.15]
    for band, alpha in _BANDS:
        low, high = [end * (1 - band) for end in ends], [end * (1 + band) for end in ends]
        axes.fill_between(ends, low, high, color=SOFT, alpha=alpha, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=1)
    targets = list(dict.fromkeys(point.cell.target for point in points))
    for number, target in enumerate(targets):
        mine = [point for point in points if point.cell.target == target]
        places = ([point.measured_tokens_per_s for point in mine], [_predicted(point) for point in mine])
        axes.plot(*places, **series(number), linestyle="none", markeredgecolor=INK, markeredgewidth=0.6,
                  markersize=7, label=target)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
        axis.set_tick_params(which="minor", length=0)
    axes.set_xlabel("measured, tokens/s")
    axes.set_ylabel("predicted, tokens/s")
    legend_below(axes)


def _table(points: tuple[predictions.PredictedPoint, ...]) -> Table:
    rows = [
        names(point.cell)
        | {
            "measured tokens/s": numbers.digits(point.measured_tokens_per_s),
            "predicted tokens/s": numbers.digits(_predicted(point)),
            "error": f"{100 * (_predicted(point) / point.measured_tokens_per_s - 1):+.1f} %",
            "uncorrected error": f"{100 * point.raw_error:+.1f} %",
        }
        for point in points
    ]
    figures = ("measured tokens/s", "predicted tokens/s", "error", "uncorrected error")
    return Table("Predicted against measured speed", rows, figures=figures)
