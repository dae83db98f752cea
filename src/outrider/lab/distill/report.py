"""What a distillation found, as plain data: `report.json`.

Shares are 0 to 1, speed-ups factors, times seconds. Intervals hold 95 %; an end that is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import MaxNLocator
from pydantic import BaseModel, ConfigDict, Field

from outrider.core.files import write_whole
from outrider.lab.distill.plan import Kind as DraftKind
from outrider.lab.drawing import INK, MARKERS, SERIES, SOFT, STYLES, draw, legend_below
from outrider.lab.statistics import Interval

SCHEMA = "outrider.distill/1"

Kind = Literal["none", "lookup", "first", "continued", "trained"]
"""no draft, lookup alone, the draft before training, the one that it was continued from, the trained one"""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Part):
    """A value with its interval over the answers."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Figure:
        """An interval, whose unknown ends are None."""
        low, high = (end if math.isfinite(end) else None for end in (interval.low, interval.high))
        return cls(value=interval.value, low=low, high=high)


class Draft(_Part):
    """The file that was made. It knows `known_tokens` of the target's `target_tokens`."""

    path: str
    kind: DraftKind = "model"
    file_bytes: int
    parameters: int
    layers: int
    feed_forward: int
    known_tokens: int
    target_tokens: int
    tensor_types: dict[str, float]
    """quantizations with their share of the weights"""
    safetensors: str | None = None
    """the folder, where one was written"""


class Data(_Part):
    """The target's answers. `coverage`: the share of the held-out answers' tokens that the draft knows."""

    prompts: list[str]
    """files; none: the bundled prompts"""
    temperatures: list[float]
    training_answers: int
    training_tokens: int
    held_out_answers: int
    coverage: float
    folder: str


class Evaluation(_Part):
    """The draft after so many steps, on the held-out answers.

    `train_loss`: the mean since the evaluation before (None: there was no step); `loss`: that of training,
    over all; `acceptance`: mean Σ min(p, q), over all; `agreement`: share of positions of greedy answers
    where its most likely token is the target's; `tokens_per_s` and `speedup`: expected at the measured costs.
    """

    step: int
    train_loss: float | None
    loss: float
    acceptance: float
    agreement: float
    tokens_per_s: float
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        """The higher, the better: expected speed, and where no draft pays at these costs, agreement."""
        return self.tokens_per_s, self.agreement


class Training(_Part):
    """`trained_tokens`: labelled positions, each as often as it was trained on; `seconds`: of the whole run,
    the answers included, as far as it was made by this call."""

    steps: int
    best_step: int
    trained_tokens: int
    loss: str
    learning_rate: float
    batch_tokens: int
    on_policy: float
    seed: int
    start: str
    seconds: float
    history: list[Evaluation]


class Category(_Part):
    """One kind of prompts. `agreement`: of the draft's most likely token; None without a draft."""

    category: str
    answers: int
    agreement: Figure | None
    over_plain: Figure
    over_lookup: Figure | None


class Contender(_Part):
    """One way to draft, replayed over the answers at measured costs.

    `agreement`: how often the draft's most likely token is the answer's, over all positions, and at the
    first, second, … place of a draft, those before it being correct. `accepted_of_three`: accepted over
    drafted tokens of drafts of three, `accepted_by_choice` of those that the automatic choice makes with
    the draft alone (None where it makes none). Speeds are those of the automatic choice with lookup
    and the draft; `bound` is the most that hindsight would allow over plain decoding, and `of_bound`
    the share reached.
    """

    kind: Kind
    file: str | None = None
    answers: int
    tokens_per_s: float
    over_plain: Figure
    over_lookup: Figure | None = None
    bound: Figure | None = None
    of_bound: Figure | None = None
    step_ratio: float | None = None
    """a step of the draft against one of the target"""
    agreement: Figure | None = None
    agreement_by_position: list[float | None] = []
    accepted_of_three: Figure | None = None
    accepted_by_choice: Figure | None = None
    categories: list[Category] = []


class Measured(_Part):
    """What the files do on held-out prompts through llama.cpp. `call_ratios`: what a target call over so many
    tokens takes against one over a single token."""

    machine: str
    answers: int
    tokens: int
    categories: dict[str, int]
    call_s: float
    call_ratios: dict[int, float]
    contenders: list[Contender]

    def of(self, kind: Kind) -> Contender | None:
        """The contender of a kind, where it takes part."""
        return next((contender for contender in self.contenders if contender.kind == kind), None)


class CurvePoint(_Part):
    """A short training on some answers of `tokens` tokens together, and what its draft does on held-out
    ones."""

    answers: int
    tokens: int
    loss: float
    acceptance: float
    agreement: float
    speedup: float


class Curve(_Part):
    """Short trainings of `steps` steps each; `per_doubling`: what doubling the data added to the agreement,
    with the 95 % interval of the straight line through the points (None: too few of them)."""

    steps: int
    points: list[CurvePoint]
    per_doubling: Figure | None


class Report(_Part):
    """All of it. `measured` is None where no report was asked for, `learning_curve` where none was."""

    schema_version: str = Field(default=SCHEMA, alias="schema")
    outrider: str
    target: str
    target_name: str
    draft: Draft
    data: Data
    training: Training
    measured: Measured | None = None
    learning_curve: Curve | None = None
    notices: list[str]


# The report's pictures: the training, acceptance by position in the draft, what more data would bring.

NAMES: dict[Kind, str] = {
    "none": "no draft",
    "lookup": "lookup alone",
    "first": "before training",
    "continued": "continued from",
    "trained": "after training",
}
"""The contenders, for people."""

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
    if report.measured is not None:
        order: tuple[Kind, ...] = ("trained", "first", "continued")
        drafts = [draft for kind in order if (draft := report.measured.of(kind)) is not None]
        if drafts:
            found["positions"] = _positions(drafts)
    if report.learning_curve is not None:
        found["data"] = _data(report.learning_curve)
    return found


def _file(name: str, height: int, alternative: str, paint: Callable[[Axes], None]) -> str:
    """A drawing that is a file of its own."""
    svg = draw(f"distill-{name}", 560, height, alternative, paint)
    head, body = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{_COLOURS}{body}\n'


def _training(training: Training) -> str:
    history, first = training.history, training.history[0]
    best = max(history, key=lambda found: found.rank)
    alternative = (
        f"Over {training.steps} steps the most likely token's agreement on held-out answers went from "
        f"{first.agreement:.0%} to {best.agreement:.0%} and the expected speed-up from {first.speedup:.2f}x "
        f"to {best.speedup:.2f}x, at step {best.step}."
    )

    def paint(axes: Axes) -> None:
        figure = axes.figure
        assert isinstance(figure, Drawing)
        axes.remove()
        losses, shares, speed = figure.subplots(3, 1, sharex=True)
        trained = [(found.step, found.train_loss) for found in history if found.train_loss is not None]
        if trained:
            _line(losses, trained, 1, "training")
        _line(losses, [(found.step, found.loss) for found in history], 0, "held out")
        losses.set_ylabel(f"loss ({training.loss})")
        _shares(shares, [(found.step, found) for found in history])
        _percent(shares)
        _line(speed, [(found.step, found.speedup) for found in history], 0, None)
        speed.axhline(1, color=SOFT, linewidth=1)
        speed.set_ylabel("expected speed-up\nover plain")
        speed.set_xlabel("steps")
        for panel in (losses, shares, speed):
            kept = "the draft that was kept" if panel is losses else None
            panel.axvline(training.best_step, color=INK, linewidth=1.2, linestyle=":", label=kept)
        for panel in (losses, shares):
            panel.legend(loc="best")
        speed.xaxis.set_major_locator(MaxNLocator(integer=True, steps=_ROUND))

    return _file("training", 640, alternative, paint)


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str | None) -> None:
    style = {"color": SERIES[number], "marker": MARKERS[number], "linestyle": STYLES[number]}
    axes.plot(*zip(*points, strict=True), **style, markersize=4, label=label)  # type: ignore[arg-type]


def _shares(axes: Axes, points: Sequence[tuple[float, Evaluation | CurvePoint]]) -> None:
    _line(axes, [(x, found.agreement) for x, found in points], 0, "most likely token agrees")
    _line(axes, [(x, found.acceptance) for x, found in points], 2, "Σ min(p, q)")
    axes.set_ylabel("on held-out answers")


def _percent(axes: Axes) -> None:
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")


def _positions(drafts: Sequence[Contender]) -> str:
    known = [
        [(i, share) for i, share in enumerate(draft.agreement_by_position, 1) if share is not None]
        for draft in drafts
    ]
    parts = (
        f"{NAMES[draft.kind]} {points[0][1]:.0%}"
        for draft, points in zip(drafts, known, strict=True)
        if points and points[0][0] == 1
    )

    def paint(axes: Axes) -> None:
        for number, (draft, points) in enumerate(zip(drafts, known, strict=True)):
            if points:
                _line(axes, points, number, NAMES[draft.kind])
        _percent(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("position in the draft, all before it correct")
        axes.set_ylabel("accepted")
        legend_below(axes, columns=3)

    return _file("positions", 340, f"Right at the first place of a draft: {', '.join(parts)}.", paint)


def _data(curve: Curve) -> str:
    last = curve.points[-1]
    alternative = f"With {last.tokens} tokens of answers the agreement is {last.agreement:.0%}"
    if curve.per_doubling is not None:
        alternative += f"; doubling the data added {100 * curve.per_doubling.value:.1f} points"

    def paint(axes: Axes) -> None:
        tokens = [point.tokens for point in curve.points]
        _shares(axes, [(point.tokens, point) for point in curve.points])
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.set_xlim(min(tokens) / 1.3, max(tokens) * 1.3)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(steps=_ROUND))
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
        axes.set_xlabel(f"tokens of answers trained on, {curve.steps} steps each")
        legend_below(axes)

    return _file("data", 340, alternative + ".", paint)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json and the pictures, report-*.svg; all their paths. Raises SettingError."""
    written = [folder / "report.json"]
    write_whole(written[0], report.model_dump_json(by_alias=True, indent=1) + "\n", "report")
    for name, svg in pictures(report).items():
        written.append(folder / f"report-{name}.svg")
        write_whole(written[-1], svg, "picture")
    return written
