"""Speed-up of every target with every draft, its plain speed beside it, for each workload."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from outrider.lab import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import Best, View, draft_name, workload_name
from outrider.lab.bench.summary.speeds import plain_speed
from outrider.lab.drawing import INK, LINE, SOFT, draw, wrapped

TITLE = "Speed-up of every pairing"
_COLOURS = LinearSegmentedColormap.from_list(
    "speed-up", ["#c8590b", "#f6e3d2", "#f4f4f0", "#cfe3f3", "#1f6fb2"]
)
_REACH = math.log2(3)
"""A speed-up of 3 and a slow-down to a third have the strongest colours."""


def heat(view: View) -> Picture | Missing:
    """The best setting of each pairing that ran for real, or else of the predicted ones."""
    cells = {w: [best for key, best in view.bests.items() if key[2] == w] for w in view.pooled_first}
    top = _largest([cell for mine in cells.values() for cell in mine])
    if not top:
        return Missing(TITLE, "no pairing was measured or predicted")
    size = (130 + 96 * (len(view.columns) + 1), 74 + 70 * len(view.results.targets))
    panels = []
    for number, (workload, mine) in enumerate(cells.items()):
        title, found = workload_name(workload), _largest(mine)
        finding = f"the largest is {found}" if found else "nothing is known"
        alternative = f"Heat map, {title}: {finding}."
        svg = draw(f"heat-{number}", *size, alternative, lambda axes, w=workload: _paint(axes, view, w))  # type: ignore[misc]
        panels.append(Panel(title, svg, is_broad=True))
    return Picture(
        id="heat",
        title=TITLE,
        finding=f"The largest speed-up is {top}.",
        reading="Each field holds the speed-up over plain decoding of the same target, and the setting that "
        "gave it: blue is faster, orange slower, a hatched field is a tie. ≈ marks what was only predicted. "
        "Plain speed is on the left, in tokens per second.",
        panels=tuple(panels),
        table=_table([cell for mine in cells.values() for cell in mine]),
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


def _paint(axes: Axes, view: View, workload: str | None) -> None:
    targets, columns = view.results.targets, view.columns
    axes.grid(False)
    axes.set_xlim(0, len(columns) + 1)
    axes.set_ylim(len(targets), 0)
    heads = ["plain\ntokens/s", *(wrapped(draft_name(draft), 13) for draft in columns)]
    axes.set_xticks([place + 0.5 for place in range(len(heads))], heads)
    axes.set_yticks([row + 0.5 for row in range(len(targets))], [wrapped(target, 16) for target in targets])
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for row, target in enumerate(targets):
        plain = numbers.rate(plain_speed(view.results, target, workload))
        axes.add_patch(_box(0, row))
        axes.text(0.5, row + 0.5, plain, ha="center", va="center", color=INK)
        for place, draft in enumerate(columns, 1):
            _field(axes, place, row, view.best(target, draft, workload))


def _box(place: int, row: int) -> Rectangle:
    return Rectangle((place + 0.03, row + 0.04), 0.94, 0.92, facecolor="none", edgecolor=LINE)


def _field(axes: Axes, place: int, row: int, cell: Best) -> None:
    box = _box(place, row)
    axes.add_patch(box)
    if cell.speedup is None:
        axes.text(place + 0.5, row + 0.5, numbers.NOTHING, ha="center", va="center", color=SOFT)
        return
    shade = _COLOURS(0.5 + max(-0.5, min(0.5, math.log2(max(cell.speedup.value, 1e-3)) / _REACH / 2)))
    box.set_facecolor(shade)
    ink = "#16181b" if _luminance(shade) > 0.2 else "#ffffff"
    if cell.outcome == "tie":
        box.set(hatch="//", edgecolor="#9aa0a6")
    backing = {"facecolor": shade, "edgecolor": "none", "pad": 1.2}
    mark, tie = "" if cell.is_measured else "≈ ", "tie, " if cell.outcome == "tie" else ""
    lines = (
        (0.26, mark + numbers.speedup(cell.speedup), 12.5, "bold"),
        (0.54, f"{tie}{cell.setting}", 9.5, "normal"),
        (0.79, numbers.bounds(cell.speedup), 9.0, "normal"),
    )
    for height, text, size, weight in lines:
        axes.text(place + 0.5, row + height, text, ha="center", va="center", color=ink, fontsize=size,
                  fontweight=weight, bbox=backing)  # fmt: skip


def _luminance(colour: tuple[float, float, float, float]) -> float:
    """As WCAG defines it, from 0 to 1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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
