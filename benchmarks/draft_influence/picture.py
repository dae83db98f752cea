"""The picture: how far a step moves the target's distribution, against lenience, for each draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Points = Sequence[tuple[float, float, float, float]]

_TITLES = {"default": "default filters, T = 0.8", "wide": "top-k 200 alone, T = 1"}
_COLOURS = ("#33658a", "#c1666b", "#58a55c", "#8d6a9f", "#5f6368")
_MARKERS = ("o", "s", "^", "D", "v")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def draw(series: Mapping[str, Mapping[str, Points]]) -> str:
    """SVG; the same series give the same bytes. A point: lenience, then mean, least and greatest prompt."""
    with rc_context({"svg.hashsalt": "draft influence", "svg.fonttype": "path", "font.size": 10.0}):
        figure = Figure(figsize=(8.6, 3.7), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(series), sharey=True, squeeze=False)[0]
        for axes, (filters, drafts) in zip(panels, series.items(), strict=True):
            _paint(axes, _TITLES.get(filters, filters), drafts)
        panels[0].set_ylim(bottom=0)  # once all are drawn: it fixes the top too
        panels[0].set_ylabel("total variation of a step, mean")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, frameon=False)
        written = StringIO()
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _paint(axes: Axes, title: str, drafts: Mapping[str, Points]) -> None:
    ticks: set[float] = set()
    for number, (draft, points) in enumerate(drafts.items()):
        if not points:
            continue
        leniences, values, least, most = zip(*points, strict=True)
        # Beside each other, so that no range hides another.
        places = [lenience * 1.04 ** (number - 1) for lenience in leniences]
        below = [value - low for value, low in zip(values, least, strict=True)]
        above = [high - value for value, high in zip(values, most, strict=True)]
        axes.errorbar(
            places, values, yerr=[below, above], label=draft, capsize=3, linewidth=1.6, elinewidth=0.9,
            markersize=5, marker=_MARKERS[number % 5], color=_COLOURS[number % 5],
        )  # fmt: skip
        ticks.update(leniences)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("lenience (1: the exact rule)")
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
