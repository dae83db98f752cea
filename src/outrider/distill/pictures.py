"""The report's pictures: the training, acceptance by position in the draft, what more data would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator

from outrider.core.files import write_whole
from outrider.distill.report import Contender, Curve, Kind, Measured, Report, Training
from outrider.lab.drawing import INK, MARKERS, SERIES, SOFT, STYLES, draw, legend_below

_NAMES: dict[Kind, str] = {
    "first": "before training",
    "continued": "continued from",
    "trained": "after training",
}

_ROUND = (1, 2, 5, 10)
"""Ticks are multiples of these."""

_COLOURS = """<style>
svg { color-scheme: light dark; --ink: #16181b; --soft: #595f66; --line: #d9dce0; --paper: #ffffff;
  --series0: #0b62ad; --series1: #b54a00; --series2: #00785a; --series3: #8a3d85; background: var(--paper); }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8eaed; --soft: #a6adb5; --line: #3a4047; --paper: #15181b;
    --series0: #62abec; --series1: #f0924a; --series2: #43c39b; --series3: #d28bcd; }
}
</style>"""


def pictures(report: Report) -> dict[str, str]:
    """SVG files by their names, those alone that there is something to show in."""
    found = {"training": _training(report.training)}
    if report.measured is not None and any(_drafts(report.measured)):
        found["positions"] = _positions(report.measured)
    if report.learning_curve is not None:
        found["data"] = _data(report.learning_curve)
    return found


def _file(name: str, size: tuple[int, int], alternative: str, paint: Callable[[Axes], None]) -> str:
    """A drawing that is a file of its own."""
    svg = draw(f"distill-{name}", *size, alternative, paint)
    head, body = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{_COLOURS}{body}\n'


def _training(training: Training) -> str:
    first = training.history[0]
    best = max(training.history, key=lambda found: found.rank)
    alternative = (
        f"Over {training.steps} steps the most likely token's agreement on held-out answers went from "
        f"{first.agreement:.0%} to {best.agreement:.0%} and the expected speed-up from {first.speedup:.2f}x "
        f"to {best.speedup:.2f}x, at step {best.step}."
    )
    return _file("training", (560, 640), alternative, lambda axes: _paint_training(axes, training))


def _paint_training(axes: Axes, training: Training) -> None:
    figure = axes.figure
    assert isinstance(figure, Drawing)
    axes.remove()
    losses, shares, speed = figure.subplots(3, 1, sharex=True)
    trained = [(found.step, found.train_loss) for found in training.history if found.train_loss is not None]
    if trained:
        _line(losses, trained, 1, "training")
    _line(losses, [(found.step, found.loss) for found in training.history], 0, "held out")
    losses.set_ylabel(f"loss ({training.loss})")
    _line(
        shares, [(found.step, found.agreement) for found in training.history], 0, "most likely token agrees"
    )
    _line(shares, [(found.step, found.acceptance) for found in training.history], 2, "Σ min(p, q)")
    shares.set_ylabel("on held-out answers")
    _percent(shares)
    _line(speed, [(found.step, found.speedup) for found in training.history], 0, None)
    speed.axhline(1, color=SOFT, linewidth=1)
    speed.set_ylabel("expected speed-up\nover plain")
    speed.set_xlabel("steps")
    for panel in (losses, shares, speed):
        kept = "the draft that was kept" if panel is losses else None
        panel.axvline(training.best_step, color=INK, linewidth=1.2, linestyle=":", label=kept)
    for panel in (losses, shares):
        panel.legend(loc="best")
    speed.xaxis.set_major_locator(MaxNLocator(integer=True, steps=_ROUND))


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str | None) -> None:
    x, y = zip(*points, strict=True)
    axes.plot(
        x,
        y,
        color=SERIES[number],
        marker=MARKERS[number],
        linestyle=STYLES[number],
        markersize=4,
        label=label,
    )


def _percent(axes: Axes) -> None:
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")


def _drafts(measured: Measured) -> list[Contender]:
    order: tuple[Kind, ...] = ("trained", "first", "continued")
    found = (measured.of(kind) for kind in order)
    return [contender for contender in found if contender is not None]


def _positions(measured: Measured) -> str:
    drafts = _drafts(measured)
    parts = (
        f"{_NAMES[draft.kind]} {draft.agreement_by_position[0]:.0%}"
        for draft in drafts
        if draft.agreement_by_position and draft.agreement_by_position[0] is not None
    )
    alternative = f"Right at the first place of a draft: {', '.join(parts)}."

    def paint(axes: Axes) -> None:
        for number, draft in enumerate(drafts):
            known = [(i, p) for i, p in enumerate(draft.agreement_by_position, 1) if p is not None]
            if known:
                _line(axes, known, number, _NAMES[draft.kind])
        _percent(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("position in the draft, all before it correct")
        axes.set_ylabel("accepted")
        legend_below(axes, columns=3)

    return _file("positions", (560, 340), alternative, paint)


def _data(curve: Curve) -> str:
    last = curve.points[-1]
    alternative = f"With {last.tokens} tokens of answers the agreement is {last.agreement:.0%}"
    if curve.per_doubling is not None:
        alternative += f"; doubling the data added {100 * curve.per_doubling.value:.1f} points"

    def paint(axes: Axes) -> None:
        tokens = [point.tokens for point in curve.points]
        _line(
            axes, [(point.tokens, point.agreement) for point in curve.points], 0, "most likely token agrees"
        )
        _line(axes, [(point.tokens, point.acceptance) for point in curve.points], 2, "Σ min(p, q)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.set_xlim(min(tokens) / 1.3, max(tokens) * 1.3)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(steps=_ROUND))
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
        axes.set_xlabel(f"tokens of answers trained on, {curve.steps} steps each")
        axes.set_ylabel("on held-out answers")
        legend_below(axes)

    return _file("data", (560, 340), alternative + ".", paint)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json and the pictures, report-*.svg; all their paths. Raises SettingError."""
    written = [folder / "report.json"]
    write_whole(written[0], report.model_dump_json(by_alias=True, indent=1) + "\n", "report")
    for name, svg in pictures(report).items():
        written.append(folder / f"report-{name}.svg")
        write_whole(written[-1], svg, "picture")
    return written
