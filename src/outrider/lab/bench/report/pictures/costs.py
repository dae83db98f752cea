"""What target calls cost by their tokens, with the stairs, and what a draft step costs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from outrider.core import numbers
from outrider.costs import CallCosts
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture, line
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View
from outrider.lab.drawing import INK, SERIES, SOFT, draw, legend_below
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
    single_s: float
    ratios: list[float]
    """times of calls over 1, 2, … tokens, in calls of one"""

    @classmethod
    def of(cls, row: CostsRow, rows: Sequence[CostsRow]) -> _Curve:
        """That of a target, with the drafts that were measured beside it."""
        mine = [r for r in rows if r.role == "draft" and r.beside in (None, row.model)]
        drafts = {draft.model: draft.costs().call_s(1, context=0) for draft in mine}
        costs = row.costs()
        seconds = costs.calls_s(_MOST, context=0)
        ratios = [float(value / seconds[0]) for value in seconds]
        return cls(row.model, costs, drafts, costs.call_s(1, context=0), ratios)

    @property
    def finding(self) -> str:
        """What a call over some tokens costs, and a draft's step."""
        text = (
            f"{self.target}: a call over 4 tokens costs {self.ratios[3]:.2f} calls of one "
            f"({numbers.milliseconds(self.single_s)}), over 8 {self.ratios[7]:.2f}, "
            f"over 16 {self.ratios[15]:.2f}"
        )
        steps = ", ".join(f"{name} {step_s / self.single_s:.2f}" for name, step_s in self.drafts.items())
        return text + (f"; a draft step costs {steps}." if steps else ".")


def costs(view: View) -> Picture | Missing:
    """A panel for each target whose calls were measured."""
    rows = view.results.costs
    curves = [_Curve.of(row, rows) for row in rows if row.role == "target"]
    if not curves:
        return Missing(TITLE, "no cost curve was measured")
    panels = []
    for number, curve in enumerate(curves):
        svg = draw(f"costs-{number}", 520, 380, curve.finding, lambda axes, curve=curve: _paint(axes, curve))  # type: ignore[misc]
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


def _paint(axes: Axes, curve: _Curve) -> None:
    sizes = range(1, _MOST + 1)
    axes.plot(sizes, curve.ratios, drawstyle="steps-mid", color=SERIES[0], label="target call V(n) / V(1)")
    measured = [p for p in curve.costs.points if (p.context_tokens, p.num_sequences) == (0, 1)]
    points = [point for point in measured if point.num_tokens <= _MOST]
    heights = [point.seconds / curve.single_s for point in points]
    spreads = [height * point.spread_ratio for height, point in zip(heights, points, strict=True)]
    axes.errorbar([p.num_tokens for p in points], heights, yerr=spreads, fmt="o", color=SERIES[0],
                  markersize=4, capsize=2, elinewidth=1, linestyle="none")  # fmt: skip
    for number, (name, step_s) in enumerate(curve.drafts.items(), 1):
        ratio = step_s / curve.single_s
        axes.axhline(ratio, **line(number), label=f"{name}: d = {ratio:.2f}")
    axes.axhline(1, color=SOFT, linewidth=0.8)
    axes.set_ylim(0, max(curve.ratios) * 1.08)
    axes.set_xlim(0, _MOST + 0.5)
    axes.set_xticks([1, 4, 8, 12, 16, 20, 24, 28, 32])
    axes.set_xlabel("tokens in the call", color=INK)
    axes.set_ylabel("time, calls of one token")
    legend_below(axes, columns=1)


def _table(curves: list[_Curve]) -> Table:
    rows = []
    for curve in curves:
        calls = [("target call", size, curve.costs.call_s(size, context=0)) for size in _TABLE_SIZES]
        calls += [(f"step of {name}", 1, step_s) for name, step_s in curve.drafts.items()]
        rows += [
            {
                "target": curve.target,
                "call": call,
                "tokens": str(size),
                "time": numbers.milliseconds(seconds),
                "calls of one token": f"{seconds / curve.single_s:.2f}",
            }
            for call, size, seconds in calls
        ]
    return Table("Time of calls", rows, figures=("tokens", "time", "calls of one token"))
