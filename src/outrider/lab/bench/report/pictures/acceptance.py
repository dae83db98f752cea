"""Acceptance by position in the draft, a line for each drafter."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outrider.core import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture, line, series
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View
from outrider.lab.bench.results import Cell
from outrider.lab.bench.summary import counts
from outrider.lab.drawing import draw, legend_below
from outrider.lab.settings import Setting

_MIN_DRAFTED = 5
TITLE = "Acceptance by position"


@dataclass(frozen=True, slots=True)
class _Line:
    """One pair over all workloads; the longest fixed draft shows the most positions."""

    cell: Cell
    found: counts.Acceptance

    @property
    def first(self) -> float:
        """The share that was accepted at the first position."""
        return next(iter(self.found.ratios), None) or 0.0

    @property
    def drafter(self) -> str:
        return "lookup" if self.cell.draft is None else self.cell.draft

    @property
    def points(self) -> list[tuple[int, float]]:
        """Positions at which enough was drafted to speak of a share; the first in any case."""
        counted = enumerate(zip(self.found.drafted, self.found.ratios, strict=False), 1)
        return [
            (place, ratio)
            for place, (drafted, ratio) in counted
            if ratio is not None and (drafted >= _MIN_DRAFTED or place == 1)
        ]


def acceptance(view: View) -> Picture | Missing:
    """A panel for each target, over all workloads."""
    groups = [
        [found for draft in view.columns_of(target) if (found := _line(view, target, draft))]
        for target in view.results.targets
    ]
    lines = [it for group in groups for it in group]
    if not lines:
        return Missing(TITLE, "no fixed draft was predicted or measured")
    best = max(lines, key=lambda it: it.first)
    return Picture(
        id="acceptance",
        title=TITLE,
        finding=f"The first drafted token is accepted most often by {best.cell.target} from {best.drafter}: "
        f"{numbers.percent(best.first)}.",
        reading="The share of tokens drafted at a position that were accepted, which needs all tokens "
        "before them to be accepted too, over all workloads. Lines come from the longest fixed draft that "
        f"ran or was replayed. Positions with fewer than {_MIN_DRAFTED} tokens are left to the table.",
        panels=tuple(_panel(group, number) for number, group in enumerate(filter(None, groups))),
        table=_table(lines),
    )


def _line(view: View, target: str, draft: str | None) -> _Line | None:
    kind = "lookup" if draft is None else "model"
    known = [Setting.of(name) for name in view.settings(target, draft)]
    fixed = [s for s in known if s.drafters == kind and s.draft_max and not s.p_min]
    for setting in sorted(fixed, key=lambda s: s.draft_max or 0, reverse=True):
        cell = Cell(target, draft, setting.name, None)
        found = counts.acceptance_by_position(view.results, cell)
        if found and found.drafted:
            return _Line(cell, found)
    return None


def _panel(lines: list[_Line], number: int) -> Panel:
    title = lines[0].cell.target
    ends = (f"{it.drafter} {numbers.percent(it.first)}" for it in lines)
    alternative = f"{title}: accepted at the first position: {', '.join(ends)}."
    svg = draw(f"acceptance-{number}", 520, 380, alternative, lambda axes: _paint(axes, lines))
    return Panel(title, svg)


def _paint(axes: Axes, lines: list[_Line]) -> None:
    for number, it in enumerate(lines):
        shown = zip(*it.points, strict=True)
        axes.plot(*shown, **series(number) | line(number), markersize=4, label=it.drafter)
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0.5, max(len(it.found.ratios) for it in lines) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    legend_below(axes, columns=1)


def _table(lines: list[_Line]) -> Table:
    rows = [
        {
            "target": it.cell.target,
            "drafts by": it.drafter,
            "setting": it.cell.setting,
            "kind": "measured" if it.found.is_measured else "replayed",
            "position": str(place),
            "drafted": str(drafted),
            "accepted": numbers.percent(ratio, 1),
        }
        for it in lines
        for place, (drafted, ratio) in enumerate(zip(it.found.drafted, it.found.ratios, strict=False), 1)
    ]
    return Table("Acceptance by position", rows, figures=("position", "drafted", "accepted"))
