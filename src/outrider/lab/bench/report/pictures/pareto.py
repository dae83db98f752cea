"""Speed against memory: which pairings nothing else beats in both, with the quality of quantizations."""

from __future__ import annotations

from matplotlib.axes import Axes

from outrider.core import numbers
from outrider.lab.bench.report.pictures.picture import Missing, Panel, Picture
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, draft_name
from outrider.lab.bench.summary.counts import memory_is_measured
from outrider.lab.bench.summary.speeds import ParetoPoint, pareto_points
from outrider.lab.drawing import INK, PAPER, SERIES, SOFT, draw, legend_below

TITLE = "Speed against memory"


def pareto(view: View) -> Picture | Missing:
    """Every pairing at its best setting, over all workloads; numbers lead to the names beneath."""
    points = pareto_points(view.results)
    if not points:
        return Missing(TITLE, "no speed was measured")
    points.sort(key=lambda point: (point.memory_bytes, point.tokens_per_s.value))
    front = [point for point in points if not point.is_dominated]
    finding = f"{len(front)} of {len(points)} pairings are beaten by no other in both: " + "; ".join(
        f"{_name(point)} ({_figures(point)})" for point in front
    )
    svg = draw("pareto", 640, 440, f"{TITLE}: {finding}.", lambda axes: _paint(axes, points))
    return Picture(
        id="pareto",
        title=TITLE,
        finding=f"{finding}.",
        reading="Filled marks are on the front: nothing else is as fast in as little memory. Hollow ones "
        "are beaten; squares are plain decoding, dots speculation. Bars are 95 % intervals of the speed. "
        "KL is the mean divergence from the reference quantization, in nats.",
        panels=(Panel("all workloads", svg, is_broad=True),),
        table=_table(view, points),
        key=tuple(f"{_name(point)}: {_figures(point)}" for point in points),
    )


def _name(point: ParetoPoint) -> str:
    draft = f" with {point.cell.draft}" if point.cell.draft else ""
    return f"{point.cell.target}{draft}, {point.cell.setting}"


def _figures(point: ParetoPoint) -> str:
    mark = "" if point.is_measured else "≈ "
    quality = f", KL {point.quality.mean_kl:.3f}" if point.quality else ""
    return (
        f"{mark}{numbers.rate(point.tokens_per_s)} tokens/s, {numbers.gigabytes(point.memory_bytes)}{quality}"
    )


def _paint(axes: Axes, points: list[ParetoPoint]) -> None:
    steps = [(p.memory_bytes / 1e9, p.tokens_per_s.value) for p in points if not p.is_dominated]
    axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=SOFT, linestyle="--", linewidth=1.2,
              label="front")  # fmt: skip
    for point in points:
        speed, is_plain = point.tokens_per_s, point.cell.is_plain
        colour, marker = SERIES[0 if is_plain else 1], "s" if is_plain else "o"
        bars = [[max(speed.value - speed.low, 0)], [max(speed.high - speed.value, 0)]]
        axes.errorbar(point.memory_bytes / 1e9, speed.value, yerr=bars, marker=marker, markersize=9,
                      color=colour, markerfacecolor=PAPER if point.is_dominated else colour,
                      markeredgecolor=colour, markeredgewidth=1.8, capsize=3, elinewidth=1.2)  # fmt: skip
    _number(axes, points)
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory, GB")
    axes.set_ylabel("tokens/s at the best setting")
    legend_below(axes)


def _number(axes: Axes, points: list[ParetoPoint]) -> None:
    """Numbers beside the marks; where marks are close by, above and below in turn."""
    ends = [point.memory_bytes / 1e9 for point in points]
    top, reach = max(point.tokens_per_s.value for point in points), (max(ends) - min(ends)) or 1.0
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(points, 1):
        place = (point.memory_bytes / 1e9, point.tokens_per_s.value)
        x, y = place[0] / reach, place[1] / top
        close = sum(abs(x - a) < 0.05 and abs(y - b) < 0.06 for a, b in taken)
        taken.append((x, y))
        quality = f"  KL {point.quality.mean_kl:.3f}" if point.quality and point.cell.is_plain else ""
        offset = ((9, 6), (9, -15), (-9, 6), (-9, -15))[close % 4]
        axes.annotate(f"{number}{quality}", place, xytext=offset, textcoords="offset points", color=INK,
                      fontsize=11, fontweight="bold", ha="left" if offset[0] > 0 else "right")  # fmt: skip


def _table(view: View, points: list[ParetoPoint]) -> Table:
    rows = [
        {
            "no.": str(number),
            "target": point.cell.target,
            "draft": draft_name(point.cell.draft),
            "setting": point.cell.setting,
            "tokens/s": numbers.rate(point.tokens_per_s),
            "95 % interval": numbers.bounds(point.tokens_per_s),
            "memory": numbers.gigabytes(point.memory_bytes)
            + ("" if memory_is_measured(view.results, point.cell.target, point.cell.draft) else " (files)"),
            "mean KL": f"{point.quality.mean_kl:.4f}" if point.quality else numbers.NOTHING,
            "on the front": "no" if point.is_dominated else "yes",
        }
        for number, point in enumerate(points, 1)
    ]
    return Table("Speed against memory", rows, figures=("no.", "tokens/s", "memory", "mean KL"))
