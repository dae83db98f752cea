"""Speed-up of every target with every draft, under each workload: a bar for each, with its interval."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes

from outrider.core import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import Best, View, draft_name, workload_name
from outrider.lab.drawing import HATCHES, INK, PAPER, SERIES, draw, legend_below

TITLE = "Speed-up of every pairing"


def pairings(view: View) -> Picture | Missing:
    """The best setting of each pairing that ran for real, or else of the predicted ones."""
    top = _largest([*view.bests.values()])
    if not top:
        return Missing(TITLE, "no pairing was measured or predicted")
    panels = []
    for number, target in enumerate(view.results.targets):
        cells = [best for best in view.bests.values() if best.target == target]
        alternative = f"{target}: the largest speed-up is {_largest(cells) or 'not known'}."
        height = 100 + (14 * len(view.columns_of(target)) + 10) * len(view.pooled_first)
        name = f"pairings-{number}"
        svg = draw(name, 560, height, alternative, partial(_paint, view=view, target=target))
        panels.append(Panel(target, svg, is_broad=True))
    return Picture(
        id="pairings",
        title=TITLE,
        finding=f"The largest speed-up is {top}.",
        reading="Each bar is the speed-up over plain decoding at the best setting, with its 95 % interval. "
        "Empty bars were only predicted. At 1, speculation gains nothing.",
        panels=tuple(panels),
        table=_table([*view.bests.values()]),
    )


def _largest(cells: list[Best]) -> str:
    """The largest speed-up in words; nothing where none is known."""
    known = [(cell.speedup.value, cell) for cell in cells if cell.speedup]
    if not known:
        return ""
    cell = max(known, key=lambda pair: pair[0])[1]
    return (
        f"{'' if cell.is_measured else 'predicted '}{numbers.speedup(cell.speedup)} ({cell.target} with "
        f"{draft_name(cell.draft)}, {workload_name(cell.workload)}, setting {cell.setting})"
    )


def _paint(axes: Axes, view: View, target: str) -> None:
    drafts = view.columns_of(target)
    height = 0.8 / len(drafts)
    for number, draft in enumerate(drafts):
        look = {"hatch": HATCHES[number % len(HATCHES)], "edgecolor": SERIES[number % len(SERIES)]}
        for row, workload in enumerate(view.pooled_first):
            cell = view.best(target, draft, workload)
            if cell.speedup is None:
                continue
            place, value = row - 0.4 + height * (number + 0.5), cell.speedup.value
            fill = SERIES[number % len(SERIES)] if cell.is_measured else PAPER
            axes.barh(place, value, height * 0.9, facecolor=fill, alpha=0.75, **look)  # type: ignore[arg-type]
            ends = [[max(value - cell.speedup.low, 0)], [max(cell.speedup.high - value, 0)]]
            axes.errorbar(value, place, xerr=ends, color=INK, elinewidth=1, capsize=2)
        axes.barh([0], [0], label=draft_name(draft), facecolor=SERIES[number % len(SERIES)], **look)  # type: ignore[arg-type]
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_yticks([*range(len(view.pooled_first))], [workload_name(name) for name in view.pooled_first])
    axes.set_ylim(len(view.pooled_first) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(False, axis="y")
    axes.set_xlabel("speed-up over plain decoding")
    legend_below(axes)


def _table(cells: list[Best]) -> Table:
    rows = [
        {
            "target": cell.target,
            "draft": draft_name(cell.draft),
            "workload": workload_name(cell.workload),
            "plain tokens/s": numbers.rate(cell.plain),
            "setting": cell.setting or numbers.NOTHING,
            "speed-up": numbers.speedup(cell.speedup),
            "95 % interval": numbers.bounds(cell.speedup),
            "verdict": cell.said,
        }
        for cell in cells
    ]
    return Table("The best setting of every pairing", rows, figures=("plain tokens/s", "speed-up"))
