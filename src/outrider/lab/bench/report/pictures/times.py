"""Where the time of a token goes, for every setting that ran: target calls, draft calls, the engine's own."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from outrider.lab import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, names, workload_name
from outrider.lab.bench.results import Cell
from outrider.lab.bench.summary import counts, speeds
from outrider.lab.drawing import HATCHES, INK, PAPER, SERIES, draw, legend_below, wrapped
from outrider.lab.statistics import Interval

TITLE = "Where the time goes"
_PARTS = ("target calls", "draft calls", "the engine's own")


@dataclass(frozen=True, slots=True)
class _Bar:
    cell: Cell
    shares: tuple[float, float, float]
    speed: Interval
    """tokens per second"""

    @property
    def label(self) -> str:
        return self.cell.setting + (f"\n{wrapped(self.cell.draft, 22)}" if self.cell.draft else "")


def times(view: View) -> Picture | Missing:
    """A panel for each target over all workloads; those of single workloads are shown on demand."""
    groups = [_bars(view, target, w) for w in view.pooled_first for target in view.results.targets]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return Missing(TITLE, "no setting ran for real and reported where its time went")
    first = groups[0][0].cell.workload
    panels = [(group[0].cell.workload == first, _panel(group, n)) for n, group in enumerate(groups)]
    bars = [bar for group in groups for bar in group]
    most = max((bar for bar in bars if not bar.cell.is_plain), key=lambda bar: bar.shares[2])
    named = names(most.cell)
    return Picture(
        id="times",
        title=TITLE,
        finding=f"At most {numbers.percent(most.shares[2], 1)} of the time is the engine's own "
        f"({named['setting']}, {named['target']} with {named['draft']}, {named['workload']}).",
        reading="Milliseconds of a generated token, stacked: the target's calls, the draft model's (its "
        "reading of the prompt included), and all else. Whiskers are the 95 % interval of the whole.",
        panels=tuple(panel for is_first, panel in panels if is_first),
        more=tuple(panel for is_first, panel in panels if not is_first),
        table=_table(bars),
    )


def _bars(view: View, target: str, workload: str | None) -> list[_Bar]:
    """Plain decoding first, then what ran, by draft."""
    results, found = view.results, []
    cells = [Cell.plain_of(target, workload)]
    for draft in view.columns:
        settings = speeds.measured_settings(results, target, draft, workload)
        cells += [Cell(target, draft, setting, workload) for setting in settings]
    for cell in cells:
        shares, speed = counts.time_shares(results, cell), speeds.measured_speed(results, cell)
        if shares and shares.is_measured and speed:
            found.append(_Bar(cell, (shares.target_calls, shares.draft_calls, shares.own), speed))
    return found


def _panel(bars: list[_Bar], number: int) -> Panel:
    plain, fast = bars[0], max(bars, key=lambda bar: bar.speed.value)
    title = f"{plain.cell.target}: {workload_name(plain.cell.workload)}"
    share = f"{numbers.percent(fast.shares[0])} target calls, {numbers.percent(fast.shares[1])} draft calls"
    alternative = (
        f"{title}: a token takes {numbers.milliseconds(1 / plain.speed.value)} with {plain.cell.setting} "
        f"and least, {numbers.milliseconds(1 / fast.speed.value)}, with {fast.cell.setting} ({share})."
    )
    lines = sum(max(bar.label.count("\n") + 1, 2) for bar in bars)
    svg = draw(f"times-{number}", 480, 95 + 17 * lines, alternative, lambda axes: _paint(axes, bars))
    return Panel(title, svg, is_broad=True)


def _paint(axes: Axes, bars: list[_Bar]) -> None:
    places = range(len(bars))
    left = [0.0] * len(bars)
    for part, name in enumerate(_PARTS):
        widths = [1000 * (bar.shares[part] / bar.speed.value) for bar in bars]
        axes.barh(places, widths, left=left, height=0.62, label=name, facecolor=SERIES[part],
                  hatch=HATCHES[part], edgecolor=PAPER, linewidth=0.6)  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    low = [max(end - 1000 / bar.speed.high, 0) for end, bar in zip(left, bars, strict=True)]
    high = [max(1000 / bar.speed.low - end, 0) for end, bar in zip(left, bars, strict=True)]
    axes.errorbar(left, places, xerr=[low, high], linestyle="none", ecolor=INK, elinewidth=1.2, capsize=3)
    farthest = max(end + over for end, over in zip(left, high, strict=True))
    for place, end, over in zip(places, left, high, strict=True):
        axes.text(end + over + farthest * 0.02, place, numbers.digits(end), va="center", fontsize=10)
    axes.set_yticks(list(places), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, farthest * 1.14)
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds of a token")
    legend_below(axes, columns=3)


def _table(bars: list[_Bar]) -> Table:
    rows = [
        names(bar.cell)
        | {"time of a token": numbers.milliseconds(1 / bar.speed.value)}
        | {part: numbers.percent(share, 1) for part, share in zip(_PARTS, bar.shares, strict=True)}
        for bar in bars
    ]
    return Table("Where the time of a token goes", rows, figures=("time of a token", *_PARTS))
