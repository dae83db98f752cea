"""Speed-up against draft length for each kind of drafter, the automatic choice beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outrider.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.bench.report.tables import Table
from outrider.bench.report.view import View, automatic, draft_name, workload_name
from outrider.bench.results import Cell
from outrider.lab import numbers
from outrider.lab.drawing import (
    INK,
    MARKERS,
    PAPER,
    SERIES,
    SOFT,
    STYLES,
    draw,
    legend_below,
)
from outrider.lab.settings import Setting
from outrider.lab.statistics import Interval

TITLE = "Speed-up against draft length"
KINDS = ("lookup", "model", "both")
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
    """All settings of one pair under one workload."""

    target: str
    draft: str | None
    workload: str | None
    points: tuple[_Point, ...]
    bound: float | None

    @property
    def title(self) -> str:
        return f"{self.target}, {draft_name(self.draft)}: {workload_name(self.workload)}"

    @property
    def automatic(self) -> _Point | None:
        """The automatic choice among all that this pair has."""
        wanted = automatic(self.draft)
        return next((point for point in self.points if point.setting.name == wanted), None)

    @property
    def fixed(self) -> list[_Point]:
        return [point for point in self.points if point.setting.draft_max is not None]

    @property
    def automatic_share(self) -> float | None:
        """The automatic choice's predicted speed over that of the best fixed setting."""
        fixed = [point.predicted.value for point in self.fixed if point.predicted]
        auto = self.automatic
        return auto.predicted.value / max(fixed) if auto and auto.predicted and fixed else None


def lengths(view: View) -> Picture | Missing:
    """A panel for each pair over all workloads; on demand those of single workloads, for each target without
    a draft model and with its best: more would make the page too long."""
    pairs = [(target, draft) for target in view.results.targets for draft in view.columns_of(target)]
    sweeps = [_sweep(view, *pair, workload) for pair in pairs for workload in view.pooled_first]
    sweeps = [sweep for sweep in sweeps if sweep.fixed]
    if not sweeps:
        return Missing(TITLE, "no fixed draft length was predicted or measured")
    first = view.pooled_first[0]
    drawn = [
        sweep for sweep in sweeps if sweep.workload == first or sweep.draft in _closer(sweeps, sweep.target)
    ]
    panels = [(sweep, _panel(sweep, number)) for number, sweep in enumerate(drawn)]
    return Picture(
        id="lengths",
        title=TITLE,
        finding=_finding([sweep for sweep in sweeps if sweep.workload == first]),
        reading="Lines are predicted (minimum probability 0), filled marks measured with their 95 % "
        "interval, hollow ones with a minimum probability above 0. Length 0 is plain decoding. The thick "
        "line is the automatic choice, which has no length of its own; the dotted one is the hindsight "
        "bound. Single workloads are drawn without a draft model and with the best one; the table has all.",
        panels=tuple(panel for sweep, panel in panels if sweep.workload == first),
        more=tuple(panel for sweep, panel in panels if sweep.workload != first),
        table=_table(sweeps),
    )


def _closer(sweeps: Sequence[_Sweep], target: str) -> set[str | None]:
    """The columns of a target that are drawn for each workload."""
    drafts: dict[str, list[float]] = defaultdict(list)
    for sweep in sweeps:
        if sweep.target == target and sweep.draft is not None:
            drafts[sweep.draft].append(max(point.value for point in sweep.points))
    best = max(drafts, key=lambda draft: sum(drafts[draft]) / len(drafts[draft]), default=None)
    return {None, best}


def _sweep(view: View, target: str, draft: str | None, workload: str | None) -> _Sweep:
    points = []
    for name in view.settings(target, draft):
        cell = Cell(target, draft, name, workload)
        measured, predicted = view.measured(cell), view.predicted(cell)
        if (measured or predicted) and name != "plain":
            points.append(_Point(Setting.of(name), predicted, measured))
    return _Sweep(target, draft, workload, tuple(points), view.bound(target, draft, workload))


def _finding(sweeps: list[_Sweep]) -> str:
    """How the automatic choice does beside the best fixed length: both predicted, for of the fixed ones only
    a few ran."""
    shares = [(share, sweep) for sweep in sweeps if (share := sweep.automatic_share)]
    if not shares:
        best = max((point for sweep in sweeps for point in sweep.fixed), key=lambda point: point.value)
        return f"The best fixed setting, {best.setting.name}, reaches {best.value:.2f}x."
    share, sweep = min(shares, key=lambda pair: pair[0])
    return (
        f"By prediction, the automatic choice reaches at least {numbers.percent(share)} of the best fixed "
        f"setting's speed (least for {sweep.target} with {draft_name(sweep.draft)})."
    )


def _alternative(sweep: _Sweep) -> str:
    best = max(sweep.fixed, key=lambda point: point.value)
    text = f"{sweep.title}: the best fixed setting is {best.setting.name} with {best.value:.2f}x"
    auto = sweep.automatic
    return text + (f", the automatic choice reaches {auto.value:.2f}x." if auto else ".")


def _panel(sweep: _Sweep, number: int) -> Panel:
    alternative = _alternative(sweep)
    svg = draw(f"lengths-{number}", 384, 310, alternative, lambda axes: _paint(axes, sweep))
    return Panel(sweep.title, svg)


def _paint(axes: Axes, sweep: _Sweep) -> None:
    axes.axhline(1, color=SOFT, linewidth=1)
    for number, kind in enumerate(KINDS):
        _line(axes, [point for point in sweep.fixed if point.setting.drafters == kind], kind, number)
    auto = sweep.automatic
    if auto:
        known = auto.measured or auto.predicted
        if known and auto.measured:
            axes.axhspan(known.low, known.high, color=INK, alpha=0.12, linewidth=0)
        name = "automatic" if auto.measured else "automatic (predicted)"
        axes.axhline(auto.value, color=INK, linewidth=2.6, label=name)
    if sweep.bound:
        axes.axhline(sweep.bound, color=INK, linewidth=1.4, linestyle=":", label="hindsight bound")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(point.setting.draft_max or 0 for point in sweep.fixed) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft length, tokens")
    axes.set_ylabel("speed-up over plain")
    legend_below(axes)


def _line(axes: Axes, points: list[_Point], kind: str, number: int) -> None:
    if not points:
        return
    colour, marker = SERIES[number], MARKERS[number]
    predicted = sorted(
        (point.setting.draft_max or 0, point.predicted.value)
        for point in points
        if point.predicted and not point.setting.p_min
    )
    if predicted:
        lengths, values = zip((0, 1.0), *predicted, strict=True)
        label = _NAMES[kind]
        axes.plot(
            lengths, values, color=colour, linestyle=STYLES[number], marker=marker, markersize=3, label=label
        )
    for point in points:
        if point.measured:
            low, high = point.value - point.measured.low, point.measured.high - point.value
            axes.errorbar(
                point.setting.draft_max or 0,
                point.value,
                yerr=[[max(low, 0)], [max(high, 0)]],
                color=colour,
                marker=marker,
                markersize=8,
                markerfacecolor=PAPER if point.setting.p_min else colour,
                markeredgecolor=INK,
                capsize=4,
                elinewidth=1.5,
                zorder=5,
            )


def _table(sweeps: list[_Sweep]) -> Table:
    rows = []
    for sweep in sweeps:
        figures = [(p.setting.name, numbers.speedup(p.predicted), p.measured) for p in sweep.points]
        figures += [("hindsight bound", f"{sweep.bound:.2f}x", None)] if sweep.bound else []
        rows += [
            {
                "target": sweep.target,
                "draft": draft_name(sweep.draft),
                "workload": workload_name(sweep.workload),
                "setting": setting,
                "predicted": predicted,
                "measured": numbers.speedup(measured),
                "95 % interval": numbers.bounds(measured),
            }
            for setting, predicted, measured in figures
        ]
    return Table.of("Speed-up of every setting", rows, figures=("predicted", "measured"))
