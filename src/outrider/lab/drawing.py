"""Drawings as inline SVG that takes its colours from the page, so that they suit light, dark and print.

Colours are placeholders while a drawing is made and become CSS variables afterwards. The same
drawing gives the same bytes: no dates, and names within the SVG that depend on its own name alone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from html import escape
from io import StringIO
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from outrider.core.numbers import printable

INK, SOFT, LINE, PAPER = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050505", "#060606", "#070707", "#080808", "#090909", "#0a0a0a")
"""Colours of series, distinguished by their markers and lines too."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
STYLES = ("-", "--", "-.", ":")

_VARIABLES = {INK: "ink", SOFT: "soft", LINE: "line", PAPER: "paper"} | {
    colour: f"series{number}" for number, colour in enumerate(SERIES)
}

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 14.0,
    "axes.labelsize": 14.0,
    "xtick.labelsize": 14.0,
    "ytick.labelsize": 14.0,
    "legend.fontsize": 14.0,
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
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
}


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
    text = written.getvalue()
    return _inline(text[text.index("<svg") :], name, width, height, alternative)


def _inline(svg: str, name: str, width: int, height: int, alternative: str) -> str:
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index(">") + 1 :], flags=re.DOTALL)
    body = re.sub(r">\s+<", "><", body.strip())
    body = re.sub(r"<[^>]+>", lambda tag: _short(tag[0], name), body)
    opening = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="DejaVu Sans, Verdana, sans-serif" aria-label="{escape(printable(alternative))}">'
    )
    return opening + printable(body)


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


def legend_below(axes: Axes, columns: int = 2) -> None:
    """All labelled series, beneath the axes, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.6)


def wrapped(name: str, width: int = 14) -> str:
    """A name over several lines: broken after hyphens, underscores, dots and spaces, or where it must be.

    >>> wrapped("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M").split(chr(10))
    ['Qwen2.5-Coder-', '1.5B-Instruct-', 'Q4_K_M']
    """
    lines = [""]
    for part in re.findall(r"[^-_. ]*[-_. ]?", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())
