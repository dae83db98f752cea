"""Acceptance by position in the draft, a line for each workload."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outrider.lab import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture, line, series
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, workload_name
from outrider.lab.bench.results import Cell
from outrider.lab.bench.summary import counts
from outrider.lab.drawing import INK, draw, legend_below
from outrider.lab.settings import Setting

_MIN_DRAFTED = 5
TITLE = "Acceptance by position"


@dataclass(frozen=True, slots=True)
class _Line:
    """One pair under one workload; the longest fixed draft shows the most positions."""

    cell: Cell
    found: counts.Acceptance
    ran: counts.Acceptance | None
    """of the longest draft that ran for real, where `found` is replayed"""

    @property
    def first(self) -> float:
        """The share that was accepted at the first position."""
        return next(iter(self.found.ratios), None) or 0.0


def acceptance(view: View) -> Picture | Missing:
    """A panel for each pair: the draft model's tokens, or without one the lookup's."""
    panels: list[Panel] = []
    lines: list[_Line] = []
    for target in view.results.targets:
        for draft in view.columns:
            mine = [it for w in view.results.workloads if (it := _line(view, target, draft, w))]
            if mine:
                panels.append(_panel(mine, len(panels)))
                lines += mine
    if not lines:
        return Missing(TITLE, "no fixed draft was predicted or measured")
    best = max(lines, key=lambda it: it.first)
    return Picture(
        id="acceptance",
        title=TITLE,
        finding=f"The first drafted token is accepted most often by {best.cell.target} from "
        f"{_drafter(best.cell.draft)} on {best.cell.workload}: {numbers.percent(best.first)}.",
        reading="The share of tokens drafted at a position that were accepted, which needs all tokens "
        "before them to be accepted too. Lines come from the longest fixed draft; large marks from the "
        "longest that ran for real, where the line is replayed. Positions with fewer than "
        f"{_MIN_DRAFTED} tokens are left to the table.",
        panels=tuple(panels),
        table=_table(lines),
    )


def _drafter(draft: str | None) -> str:
    return "the lookup" if draft is None else draft


def _line(view: View, target: str, draft: str | None, workload: str) -> _Line | None:
    kind = "lookup" if draft is None else "model"
    known = [Setting.of(name) for name in view.settings(target, draft)]
    fixed = [s for s in known if s.drafters == kind and s.draft_max and not s.p_min]
    fixed.sort(key=lambda s: s.draft_max or 0, reverse=True)
    cells = [Cell(target, draft, setting.name, workload) for setting in fixed]
    asked = [(cell, counts.acceptance_by_position(view.results, cell)) for cell in cells]
    drafted = [(cell, found) for cell, found in asked if found and found.drafted]
    if not drafted:
        return None
    cell, found = drafted[0]
    ran = next((other for _, other in drafted if other.is_measured), None)
    return _Line(cell, found, None if found.is_measured else ran)


def _panel(lines: list[_Line], number: int) -> Panel:
    title = f"{lines[0].cell.target}, {_drafter(lines[0].cell.draft)}"
    ends = (f"{it.cell.workload} {numbers.percent(it.first)}" for it in lines)
    alternative = f"{title}: accepted at the first position: {', '.join(ends)}."
    svg = draw(f"acceptance-{number}", 384, 290, alternative, lambda axes: _paint(axes, lines))
    return Panel(title, svg)


def _paint(axes: Axes, lines: list[_Line]) -> None:
    for number, it in enumerate(lines):
        shown = zip(*_points(it.found), strict=True)
        axes.plot(*shown, **series(number) | line(number), markersize=4, label=it.cell.workload)
        if it.ran:
            ran = zip(*_points(it.ran), strict=True)
            axes.plot(*ran, **series(number), linestyle="none", markersize=9, markeredgecolor=INK)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0.5, max(len(it.found.ratios) for it in lines) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    legend_below(axes, columns=3)


def _points(found: counts.Acceptance) -> list[tuple[int, float]]:
    """Positions at which enough was drafted to speak of a share; the first in any case."""
    counted = zip(found.drafted, found.ratios, strict=False)
    return [
        (place, ratio)
        for place, (drafted, ratio) in enumerate(counted, 1)
        if ratio is not None and (drafted >= _MIN_DRAFTED or place == 1)
    ]


def _table(lines: list[_Line]) -> Table:
    rows = [
        {
            "target": it.cell.target,
            "drafts by": _drafter(it.cell.draft),
            "workload": workload_name(it.cell.workload),
            "setting": setting,
            "kind": "measured" if found.is_measured else "replayed",
            "position": str(place),
            "drafted": str(drafted),
            "accepted": numbers.percent(ratio, 1),
        }
        for it in lines
        for setting, found in ((it.cell.setting, it.found), ("the longest that ran", it.ran))
        if found
        for place, (drafted, ratio) in enumerate(zip(found.drafted, found.ratios, strict=False), 1)
    ]
    return Table("Acceptance by position", rows, figures=("position", "drafted", "accepted"))
