"""Speed-up against draft length for each kind of drafter, the automatic choice beside them."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outrider.core import numbers
from outrider.core.numbers import Interval
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture, line, series
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, draft_name, names, workload_name
from outrider.lab.bench.results import Cell
from outrider.lab.bench.summary.predictions import bound_speedup
from outrider.lab.drawing import INK, PAPER, SERIES, SOFT, draw, legend_below
from outrider.lab.settings import AUTO, AUTO_LOOKUP, Setting

TITLE = "Speed-up against draft length"
_NAMES = {"lookup": "lookup alone", "model": "draft model", "both": "both together"}


@dataclass(frozen=True, slots=True)
class _Point:
    setting: Setting
    predicted: Interval | None
    measured: Interval | None

    @property
    def value(self) -> float:
        known = self.measured or self.predicted
        return known.value if known else 0.0


@dataclass(frozen=True, slots=True)
class _Sweep:
    """All settings of one pair under one workload; `cell` is that of the automatic choice."""

    cell: Cell
    points: list[_Point]
    bound: Interval | None

    @classmethod
    def of(cls, view: View, target: str, draft: str | None, workload: str | None) -> _Sweep:
        """What was replayed or ran, in order."""
        cell = Cell(target, draft, (AUTO_LOOKUP if draft is None else AUTO).name, workload)
        cells = [cell._replace(setting=name) for name in view.settings(target, draft)]
        points = [_Point(Setting.of(c.setting), view.predicted(c), view.measured(c)) for c in cells]
        known = [point for point in points if point.predicted or point.measured]
        return cls(cell, known, bound_speedup(view.results, cell))

    @property
    def automatic(self) -> _Point | None:
        """The automatic choice among all that this pair has."""
        return next((point for point in self.points if point.setting.name == self.cell.setting), None)

    @property
    def fixed(self) -> list[_Point]:
        return [point for point in self.points if point.setting.draft_max is not None]

    @property
    def best(self) -> float:
        """The highest speed-up."""
        return max(point.value for point in self.points)

    @property
    def automatic_share(self) -> float | None:
        """The automatic choice's predicted speed over that of the best fixed setting."""
        fixed = [point.predicted.value for point in self.fixed if point.predicted]
        auto = self.automatic
        return auto.predicted.value / max(fixed) if auto and auto.predicted and fixed else None


def lengths(view: View) -> Picture | Missing:
    """Two panels for each target, over all workloads: without a draft model and with its best."""
    sweeps: list[_Sweep] = []
    for target in view.results.targets:
        mine = [_Sweep.of(view, target, draft, view.pooled) for draft in view.columns_of(target)]
        mine = [sweep for sweep in mine if sweep.fixed]
        sweeps += [sweep for sweep in mine if sweep.cell.draft is None]
        drafted = [sweep for sweep in mine if sweep.cell.draft is not None]
        sweeps += [max(drafted, key=lambda sweep: sweep.best)] if drafted else []
    if not sweeps:
        return Missing(TITLE, "no fixed draft length was predicted or measured")
    return Picture(
        id="lengths",
        title=TITLE,
        finding=_finding(sweeps),
        reading="Lines are predicted (minimum probability 0), filled marks measured with their 95 % "
        "interval, hollow ones with a minimum probability above 0. Length 0 is plain decoding. The thick "
        "line is the automatic choice, which has no length of its own; the dotted one is the hindsight "
        "bound. Of several drafts the best is drawn; `outrider bench export` writes every setting with every "
        "draft under every workload as a table.",
        panels=tuple(_panel(sweep, number) for number, sweep in enumerate(sweeps)),
        table=_table(sweeps),
    )


def _finding(sweeps: list[_Sweep]) -> str:
    """How the automatic choice does beside the best fixed length: both predicted, for of the fixed ones only
    a few ran."""
    shares = [(share, sweep.cell) for sweep in sweeps if (share := sweep.automatic_share)]
    if not shares:
        best = max((point for sweep in sweeps for point in sweep.fixed), key=lambda point: point.value)
        return f"The best fixed setting, {best.setting.name}, reaches {best.value:.2f}x."
    share, cell = min(shares, key=lambda pair: pair[0])
    return (
        f"By prediction, the automatic choice reaches at least {numbers.percent(share)} of the best fixed "
        f"setting's speed (least for {cell.target} with {draft_name(cell.draft)})."
    )


def _panel(sweep: _Sweep, number: int) -> Panel:
    best, auto, cell = max(sweep.fixed, key=lambda point: point.value), sweep.automatic, sweep.cell
    title = f"{cell.target}, {draft_name(cell.draft)}: {workload_name(cell.workload)}"
    alternative = f"{title}: the best fixed setting is {best.setting.name} with {best.value:.2f}x"
    alternative += f", the automatic choice reaches {auto.value:.2f}x." if auto else "."
    svg = draw(f"lengths-{number}", 384, 310, alternative, lambda axes: _paint(axes, sweep))
    return Panel(title, svg)


def _paint(axes: Axes, sweep: _Sweep) -> None:
    axes.axhline(1, color=SOFT, linewidth=1)
    for number, kind in enumerate(_NAMES):
        _paint_kind(axes, [point for point in sweep.fixed if point.setting.drafters == kind], kind, number)
    if auto := sweep.automatic:
        if auto.measured:
            axes.axhspan(auto.measured.low, auto.measured.high, color=INK, alpha=0.12, linewidth=0)
        name = "automatic" if auto.measured else "automatic (predicted)"
        axes.axhline(auto.value, color=INK, linewidth=2.6, label=name)
    if sweep.bound:
        axes.axhline(sweep.bound.value, color=INK, linewidth=1.4, linestyle=":", label="hindsight bound")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(point.setting.draft_max or 0 for point in sweep.fixed) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft length, tokens")
    axes.set_ylabel("speed-up over plain")
    legend_below(axes)


def _paint_kind(axes: Axes, points: list[_Point], kind: str, number: int) -> None:
    known = [
        (p.setting.draft_max or 0, p.predicted.value) for p in points if p.predicted and not p.setting.p_min
    ]
    if known:
        places = zip((0, 1.0), *sorted(known), strict=True)
        axes.plot(*places, **series(number) | line(number), markersize=3, label=_NAMES[kind])
    for point in points:
        if point.measured:
            low, high = point.value - point.measured.low, point.measured.high - point.value
            axes.errorbar(point.setting.draft_max or 0, point.value, yerr=[[max(low, 0)], [max(high, 0)]],
                          **series(number), markersize=8, markeredgecolor=INK, capsize=4, elinewidth=1.5,
                          markerfacecolor=PAPER if point.setting.p_min else SERIES[number],
                          zorder=5)  # fmt: skip


def _table(sweeps: list[_Sweep]) -> Table:
    """What is drawn: fixed settings that end by probability alone where they ran."""
    rows = []
    for sweep in sweeps:
        drawn = [point for point in sweep.points if point.measured or not point.setting.p_min]
        figures = [(p.setting.name, p.predicted, p.measured) for p in drawn]
        figures += [("hindsight bound", sweep.bound, None)] if sweep.bound else []
        rows += [
            names(sweep.cell._replace(setting=setting))
            | {
                "predicted": numbers.speedup(predicted),
                "measured": numbers.speedup(measured),
                "95 % interval": numbers.bounds(measured),
            }
            for setting, predicted, measured in figures
        ]
    return Table("Speed-up of every setting", rows, figures=("predicted", "measured"))
