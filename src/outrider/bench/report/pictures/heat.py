"""Speed-up of every target with every draft, its plain speed beside it, for each workload."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from outrider.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.bench.report.tables import Table
from outrider.bench.report.view import Best, View, draft_name, workload_name
from outrider.lab import numbers
from outrider.lab.drawing import INK, LINE, SOFT, draw, wrapped

TITLE = "Speed-up of every pairing"
_COLOURS = LinearSegmentedColormap.from_list(
    "speed-up", ["#c8590b", "#f6e3d2", "#f4f4f0", "#cfe3f3", "#1f6fb2"]
)
_REACH = math.log2(3)
"""A speed-up of 3 and a slow-down to a third have the strongest colours."""


def heat(view: View) -> Picture | Missing:
    """The best setting of each pairing that ran for real, or else of the predicted ones."""
    cells = [cell for workload in view.pooled_first for cell in _cells(view, workload)]
    known = [cell for cell in cells if cell.speedup]
    if not known:
        return Missing(TITLE, "no pairing was measured or predicted")
    top = max(known, key=lambda cell: cell.speedup.value if cell.speedup else 0.0)
    panels = tuple(_panel(view, workload) for workload in view.pooled_first)
    return Picture(
        id="heat",
        title=TITLE,
        finding=f"The largest speed-up is {_describe(top)}.",
        reading="Each field holds the speed-up over plain decoding of the same target, and the setting that "
        "gave it: blue is faster, orange slower, a hatched field is a tie. ≈ marks what was only predicted. "
        "Plain speed is on the left, in tokens per second.",
        panels=panels,
        table=_table(cells),
    )


def _cells(view: View, workload: str | None) -> Iterator[Best]:
    for target in view.results.targets:
        for draft in view.columns:
            yield view.best(target, draft, workload)


def _describe(cell: Best) -> str:
    mark = "" if cell.is_measured else "predicted "
    return (
        f"{mark}{numbers.speedup(cell.speedup)} ({cell.target} with {draft_name(cell.draft)}, "
        f"{workload_name(cell.workload)}, setting {cell.setting})"
    )


def _panel(view: View, workload: str | None) -> Panel:
    targets, columns = view.results.targets, view.columns
    title = workload_name(workload)
    known = [cell for cell in _cells(view, workload) if cell.speedup]
    top = max(known, key=lambda cell: cell.speedup.value if cell.speedup else 0.0, default=None)
    alternative = f"Heat map, {title}: " + (
        f"the largest is {_describe(top)}." if top else "nothing is known."
    )
    width, height = 130 + 96 * (len(columns) + 1), 74 + 70 * len(targets)
    name = f"heat-{view.place(workload)}"
    svg = draw(name, width, height, alternative, lambda axes: _paint(axes, view, workload))
    return Panel(title, svg, is_broad=True)


def _paint(axes: Axes, view: View, workload: str | None) -> None:
    targets, columns = view.results.targets, view.columns
    axes.grid(False)
    axes.set_xlim(0, len(columns) + 1)
    axes.set_ylim(len(targets), 0)
    heads = ["plain\ntokens/s", *(wrapped(draft_name(draft), 13) for draft in columns)]
    axes.set_xticks([place + 0.5 for place in range(len(heads))], heads)
    axes.set_yticks(
        [place + 0.5 for place in range(len(targets))], [wrapped(target, 16) for target in targets]
    )
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    for row, target in enumerate(targets):
        plain = view.plain(target, workload)
        axes.add_patch(Rectangle((0.03, row + 0.04), 0.94, 0.92, facecolor="none", edgecolor=LINE))
        axes.text(0.5, row + 0.5, numbers.rate(plain), ha="center", va="center", color=INK)
        for place, draft in enumerate(columns, 1):
            _field(axes, place, row, view.best(target, draft, workload))


def _field(axes: Axes, place: int, row: int, cell: Best) -> None:
    box = Rectangle((place + 0.03, row + 0.04), 0.94, 0.92, facecolor="none", edgecolor=LINE)
    axes.add_patch(box)
    if cell.speedup is None:
        axes.text(place + 0.5, row + 0.5, numbers.NOTHING, ha="center", va="center", color=SOFT)
        return
    level = 0.5 + max(-0.5, min(0.5, math.log2(max(cell.speedup.value, 1e-3)) / _REACH / 2))
    box.set_facecolor(_COLOURS(level))
    shade = _COLOURS(level)
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
    return Table.of("The best setting of every pairing", rows, figures=("plain tokens/s", "speed-up"))
