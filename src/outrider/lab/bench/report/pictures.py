"""The report's pictures: inline SVG that takes its colours from the page, so that they suit light, dark and
print, one sentence that says what they show, and their numbers.

Colours are placeholders while a drawing is made and become CSS variables afterwards. The same
drawing gives the same bytes: no dates, and names within the SVG that depend on its own name alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from io import StringIO
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from outrider.core import numbers
from outrider.costs import CallCosts
from outrider.lab.bench import figures
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.results import Cell, Results
from outrider.lab.rows import CostsRow
from outrider.lab.settings import Setting

INK, SOFT, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050505", "#060606", "#070707", "#080808", "#090909", "#0a0a0a")
"""Colours of series, distinguished by their markers and lines too."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
_STYLES = ("-", "--", "-.", ":")

_VARIABLES = {INK: "ink", SOFT: "soft", LINE: "line", PAPER: "paper"} | {
    colour: f"series{number}" for number, colour in enumerate(SERIES)
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_TEXT = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")

_STYLE: dict[Any, Any] = dict.fromkeys(_TEXT, 14.0) | {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "legend.frameon": False,
    "axes.prop_cycle": cycler("color", [INK]),
    "text.color": INK,
    "text.usetex": False,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels that belong together.

    Args:
        finding: The main finding in figures, one sentence.
        reading: How to read it.
        panels: Drawings by their titles.
        table: Their numbers.
    """

    id: str
    title: str
    finding: str
    reading: str
    panels: Mapping[str, str]
    table: Table


def draw(name: str, width: int, height: int, alternative: str, paint: Callable[[Axes], None]) -> str:
    """An `svg` element of this size in pixels that `paint` drew; `alternative` is its text.

    `name` is unique on the page: the names within the drawing begin with it.
    """
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        written = StringIO()
        with warnings.catch_warnings():
            # A name in a script that the font lacks: the drawing shows boxes, its table the name.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            ConstrainedLayoutEngine().execute(figure)  # a figure that has it is drawn twice
            figure.savefig(written, format="svg", metadata=_NO_METADATA)
    svg = written.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r">\s+<", "><", body.strip())
    body = re.sub(r"<[^>]+>", lambda tag: _short(tag[0], name), body)
    label = escape(numbers.printable(alternative))
    opening = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" aria-label="{label}">'
    )
    return opening + numbers.printable(body)


def _short(tag: str, name: str) -> str:
    """A tag of a drawing without what it can do without, its names made those of this drawing."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", re.sub(r"\s+", " ", tag))
    tag = re.sub(r' transform="rotate\(-0 [^"]*"', "", tag)
    # All text is of one family, which is wide: others have room enough.
    tag = tag.replace("font-family: 'DejaVu Sans'; ", "")
    # Places, not scales, which are below 1: a hundredth of a pixel is enough.
    tag = re.sub(r"\b[1-9]\d*\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)
    tag = re.sub(r"(\d)\.0+(?=[ \",)])", r"\1", tag)
    tag = re.sub(r'\b(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", tag).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return tag


def _legend_below(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=1, handlelength=2.6)


def _line(number: int) -> dict[str, Any]:
    return {"color": SERIES[number % len(SERIES)], "linestyle": _STYLES[number % len(_STYLES)]}


# Acceptance by position in the draft, a line for each drafter

_MIN_DRAFTED = 5


@dataclass(frozen=True, slots=True)
class _Drafter:
    """One pair over all workloads; the longest fixed draft shows the most positions."""

    cell: Cell
    found: figures.Acceptance

    @property
    def first(self) -> float:
        """The share that was accepted at the first position."""
        return next(iter(self.found.ratios), None) or 0.0

    @property
    def name(self) -> str:
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


def acceptance(results: Results) -> Picture | str:
    """A panel for each target, over all workloads."""
    title = "Acceptance by position"
    groups = {
        target: [found for d in results.columns_of(target) if (found := _drafter(results, target, d))]
        for target in results.targets
    }
    drafters = [one for group in groups.values() for one in group]
    if not drafters:
        return f"{title}: no fixed draft was predicted or measured."
    best = max(drafters, key=lambda one: one.first)
    panels = {}
    for number, (target, group) in enumerate((t, group) for t, group in groups.items() if group):
        ends = ", ".join(f"{one.name} {numbers.percent(one.first)}" for one in group)
        alternative = f"{target}: accepted at the first position: {ends}."
        panels[target] = draw(f"acceptance-{number}", 520, 380, alternative, partial(_paint_shares, group))
    rows = [
        {
            "target": one.cell.target,
            "drafts by": one.name,
            "setting": one.cell.setting,
            "kind": "measured" if one.found.is_measured else "replayed",
            "position": str(place),
            "drafted": str(drafted),
            "accepted": numbers.percent(ratio, 1),
        }
        for one in drafters
        for place, (drafted, ratio) in enumerate(zip(one.found.drafted, one.found.ratios, strict=False), 1)
    ]
    return Picture(
        id="acceptance",
        title=title,
        finding=f"The first drafted token is accepted most often by {best.cell.target} from {best.name}: "
        f"{numbers.percent(best.first)}.",
        reading="The share of tokens drafted at a position that were accepted, which needs all tokens "
        "before them to be accepted too, over all workloads. Lines come from the longest fixed draft that "
        f"ran or was replayed. Positions with fewer than {_MIN_DRAFTED} tokens are left to the table.",
        panels=panels,
        table=Table(title, rows, ("position", "drafted", "accepted")),
    )


def _drafter(results: Results, target: str, draft: str | None) -> _Drafter | None:
    kind = "lookup" if draft is None else "model"
    known = [Setting.of(name) for name in results.settings(target, draft)]
    fixed = [s for s in known if s.drafters == kind and s.draft_max and not s.p_min]
    for setting in sorted(fixed, key=lambda s: s.draft_max or 0, reverse=True):
        cell = Cell(target, draft, setting.name, None)
        found = figures.acceptance_by_position(results, cell)
        if found and found.drafted:
            return _Drafter(cell, found)
    return None


def _paint_shares(drafters: list[_Drafter], axes: Axes) -> None:
    for number, one in enumerate(drafters):
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(
            *zip(*one.points, strict=True), **_line(number), marker=marker, markersize=4, label=one.name
        )
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0.5, max(len(one.found.ratios) for one in drafters) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted")
    _legend_below(axes)


# What target calls cost by their tokens, with the stairs, and what a draft step costs beside them

_MOST = 33
"""tokens of the longest call shown: the last one and 32 drafted"""
_TABLE_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


@dataclass(frozen=True, slots=True)
class _Curve:
    """A target's, with seconds of a step of each draft that was measured beside it; `ratios` are times of
    calls over 1, 2, … tokens, in calls of one."""

    target: str
    costs: CallCosts
    drafts: dict[str, float]
    single_s: float
    ratios: list[float]

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


def costs(results: Results) -> Picture | str:
    """A panel for each target whose calls were measured."""
    title = "What a call costs"
    curves = [_curve(row, results) for row in results.costs if row.role == "target"]
    if not curves:
        return f"{title}: no cost curve was measured."
    panels = {
        curve.target: draw(f"costs-{number}", 520, 380, curve.finding, partial(_paint_costs, curve))
        for number, curve in enumerate(curves)
    }
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
    return Picture(
        id="costs",
        title=title,
        finding=curves[0].finding,
        reading="V(n) / V(1): a target call over n tokens, in calls of a single one, at an empty context. "
        "Dots are measured calls, and their bars the spread of the samples. A flat stretch is a stair: "
        "longer drafts cost nothing there. Horizontal lines are one step of each draft model.",
        panels=panels,
        table=Table("Time of calls", rows, ("tokens", "time", "calls of one token")),
    )


def _curve(row: CostsRow, results: Results) -> _Curve:
    mine = [r for r in results.costs if r.role == "draft" and r.beside in (None, row.model)]
    costs, drafts = row.costs(), {draft.model: draft.costs().call_s(1, context=0) for draft in mine}
    seconds = costs.calls_s(_MOST, context=0)
    ratios = [float(value / seconds[0]) for value in seconds]
    return _Curve(row.model, costs, drafts, costs.call_s(1, context=0), ratios)


def _paint_costs(curve: _Curve, axes: Axes) -> None:
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
        axes.axhline(ratio, **_line(number), label=f"{name}: d = {ratio:.2f}")
    axes.axhline(1, color=SOFT, linewidth=0.8)
    axes.set_ylim(0, max(curve.ratios) * 1.08)
    axes.set_xlim(0, _MOST + 0.5)
    axes.set_xticks([1, 4, 8, 12, 16, 20, 24, 28, 32])
    axes.set_xlabel("tokens in the call", color=INK)
    axes.set_ylabel("time, calls of one token")
    _legend_below(axes)


PICTURES: tuple[Callable[[Results], Picture | str], ...] = (acceptance, costs)
"""In their order; a text says why there is nothing to show."""
