"""What target calls cost by their tokens, with the stairs, and what a draft step costs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from outrider.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.bench.report.tables import Table
from outrider.bench.report.view import View
from outrider.costs import CallCosts
from outrider.lab import numbers
from outrider.lab.drawing import INK, SERIES, SOFT, STYLES, draw, legend_below
from outrider.lab.rows import CostsRow

TITLE = "What a call costs"
_MOST = 33
"""tokens of the longest call shown: the last one and 32 drafted"""
_TABLE_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


@dataclass(frozen=True, slots=True)
class _Curve:
    target: str
    costs: CallCosts
    drafts: dict[str, float]
    """seconds of a draft's step, by its name"""

    @property
    def ratios(self) -> list[float]:
        """Times of calls over 1, 2, … tokens, in calls of one."""
        seconds = self.costs.calls_s(_MOST, context=0)
        return [float(value / seconds[0]) for value in seconds]

    @property
    def single_s(self) -> float:
        return self.costs.call_s(1, context=0)

    @property
    def finding(self) -> str:
        """What a call over some tokens costs, and a draft's step."""
        ratios = self.ratios
        text = (
            f"{self.target}: a call over 4 tokens costs {ratios[3]:.2f} calls of one "
            f"({numbers.milliseconds(self.single_s)}), over 8 {ratios[7]:.2f}, over 16 {ratios[15]:.2f}"
        )
        steps = ", ".join(f"{name} {step_s / self.single_s:.2f}" for name, step_s in self.drafts.items())
        return text + (f"; a draft step costs {steps}." if steps else ".")


def costs(view: View) -> Picture | Missing:
    """A panel for each target whose calls were measured."""
    curves = _curves(view)
    if not curves:
        return Missing(TITLE, "no cost curve was measured")
    panels = []
    for number, curve in enumerate(curves):
        svg = draw(f"costs-{number}", 384, 300, curve.finding, lambda axes, curve=curve: _paint(axes, curve))  # type: ignore[misc]
        panels.append(Panel(curve.target, svg))
    return Picture(
        id="costs",
        title=TITLE,
        finding=curves[0].finding,
        reading="V(n) / V(1): a target call over n tokens, in calls of a single one, at an empty context. "
        "Dots are measured calls, and their bars the spread of the samples. A flat stretch is a stair: "
        "longer drafts cost nothing there. Horizontal lines are one step of each draft model.",
        panels=tuple(panels),
        table=_table(curves),
    )


def _curves(view: View) -> list[_Curve]:
    rows = view.results.costs
    return [_Curve(row.model, row.costs(), _steps(rows, row.model)) for row in rows if row.role == "target"]


def _steps(rows: Sequence[CostsRow], target: str) -> dict[str, float]:
    """Of the drafts that were measured beside this target."""
    mine = [row for row in rows if row.role == "draft" and row.beside in (None, target)]
    return {row.model: row.costs().call_s(1, context=0) for row in mine}


def _paint(axes: Axes, curve: _Curve) -> None:
    sizes = range(1, _MOST + 1)
    axes.plot(sizes, curve.ratios, drawstyle="steps-mid", color=SERIES[0], label="target call V(n) / V(1)")
    points = [
        p
        for p in curve.costs.points
        if (p.context_tokens, p.num_sequences) == (0, 1) and p.num_tokens <= _MOST
    ]
    heights = [point.seconds / curve.single_s for point in points]
    spreads = [height * point.spread_ratio for height, point in zip(heights, points, strict=True)]
    axes.errorbar([p.num_tokens for p in points], heights, yerr=spreads, fmt="o", color=SERIES[0],
                  markersize=4, capsize=2, elinewidth=1, linestyle="none")  # fmt: skip
    for number, (name, step_s) in enumerate(curve.drafts.items(), 1):
        style = STYLES[number % len(STYLES)]
        ratio = step_s / curve.single_s
        axes.axhline(
            ratio, color=SERIES[number % len(SERIES)], linestyle=style, label=f"{name}: d = {ratio:.2f}"
        )
    axes.axhline(1, color=SOFT, linewidth=0.8)
    axes.set_ylim(0, max(curve.ratios) * 1.08)
    axes.set_xlim(0, _MOST + 0.5)
    axes.set_xticks([1, 4, 8, 12, 16, 20, 24, 28, 32])
    axes.set_xlabel("tokens in the call", color=INK)
    axes.set_ylabel("time, calls of one token")
    legend_below(axes, columns=1)


def _table(curves: list[_Curve]) -> Table:
    calls = [
        (curve, "target call", size, curve.costs.call_s(size, context=0))
        for curve in curves
        for size in _TABLE_SIZES
    ]
    calls += [
        (curve, f"step of {name}", 1, step_s) for curve in curves for name, step_s in curve.drafts.items()
    ]
    calls.sort(key=lambda call: curves.index(call[0]))
    rows = [
        {
            "target": curve.target,
            "call": call,
            "tokens": str(size),
            "time": numbers.milliseconds(seconds),
            "calls of one token": f"{seconds / curve.single_s:.2f}",
        }
        for curve, call, size, seconds in calls
    ]
    return Table.of("Time of calls", rows, figures=("tokens", "time", "calls of one token"))
