"""What a distillation found, as plain data: `report.json`, and a picture of the training.

Shares are 0 to 1, speed-ups factors, times seconds. Intervals hold 95 %; an end that is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic_core import to_jsonable_python

from outrider.core.files import write_whole
from outrider.lab.distill.plan import Loss, Start
from outrider.lab.drawing import INK, MARKERS, SERIES, SOFT, STYLES, draw
from outrider.lab.judged import Calls, DraftReport
from outrider.lab.predict import Speedups

SCHEMA = "outrider.distill/1"

Kind = Literal["continued", "first", "trained"]
NAMES: Mapping[Kind, str] = {
    "continued": "continued from",
    "first": "before training",
    "trained": "after training",
}
"""The drafts that are compared, for people."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The file that was made. It knows `known_tokens` of the target's `target_tokens`; `tensor_types` are
    quantizations with their share of the weights."""

    path: str
    file_bytes: int
    parameters: int
    layers: int
    feed_forward: int
    known_tokens: int
    target_tokens: int
    tensor_types: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Data:
    """The target's answers. `prompts`: files; none: the bundled prompts. `coverage`: the share of the
    held-out answers' tokens that the draft knows."""

    prompts: Sequence[str]
    temperatures: Sequence[float]
    training_answers: int
    training_tokens: int
    held_out_answers: int
    coverage: float
    folder: str


@dataclass(frozen=True, slots=True)
class Evaluation:
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


@dataclass(frozen=True, slots=True)
class Training:
    """`trained_tokens`: labelled positions, each as often as it was trained on; `seconds`: of the whole run,
    the answers included, as far as it was made by this call."""

    steps: int
    best_step: int
    trained_tokens: int
    loss: Loss
    learning_rate: float
    batch_tokens: int
    on_policy: float
    seed: int
    start: Start
    seconds: float
    history: Sequence[Evaluation]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the files do on held-out prompts through llama.cpp: what calls of the target cost, lookup alone,
    and each draft as `outrider check` has it. `accepted` of the tokens that the automatic choice drafts with
    a draft alone (None: it drafts none)."""

    machine: str
    answers: int
    tokens: int
    workloads: Mapping[str, int]
    plain_tokens_per_s: float
    calls: Calls
    lookup: Speedups
    drafts: Mapping[Kind, DraftReport]
    accepted: Mapping[Kind, float | None]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `measured` is None where no report was asked for."""

    outrider: str
    target: str
    target_name: str
    draft: Draft
    data: Data
    training: Training
    notices: Sequence[str]
    measured: Measured | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json and report-training.svg; their paths. Raises SettingError."""
    files = folder / "report.json", folder / "report-training.svg"
    write_whole(files[0], json.dumps(report.as_json(), indent=1) + "\n", "report")
    write_whole(files[1], picture(report.training), "picture")
    return [*files]


_COLOURS = """<style>
svg { color-scheme: light dark; --ink: #16181b; --soft: #595f66; --line: #d9dce0; --paper: #ffffff;
  --series0: #0b62ad; --series1: #b54a00; --series2: #00785a; background: var(--paper); }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8eaed; --soft: #a6adb5; --line: #3a4047; --paper: #15181b;
    --series0: #62abec; --series1: #f0924a; --series2: #43c39b; }
}
</style>"""


def picture(training: Training) -> str:
    """Loss, agreement and expected speed-up over the steps, as an SVG file."""
    history, first = training.history, training.history[0]
    best = max(history, key=lambda found: found.rank)
    alternative = (
        f"Over {training.steps} steps the most likely token's agreement on held-out answers went from "
        f"{first.agreement:.0%} to {best.agreement:.0%} and the expected speed-up from {first.speedup:.2f}x "
        f"to {best.speedup:.2f}x, at step {best.step}."
    )

    def paint(axes: Axes) -> None:
        figure = axes.figure
        assert isinstance(figure, Figure)
        axes.remove()
        losses, shares, speed = figure.subplots(3, 1, sharex=True)
        trained = [(found.step, found.train_loss) for found in history if found.train_loss is not None]
        if trained:
            _line(losses, trained, 1, "training")
        _line(losses, [(found.step, found.loss) for found in history], 0, "held out")
        losses.set_ylabel(f"loss ({training.loss})")
        _line(shares, [(found.step, found.agreement) for found in history], 0, "most likely token agrees")
        _line(shares, [(found.step, found.acceptance) for found in history], 2, "Σ min(p, q)")
        shares.set_ylabel("on held-out answers")
        shares.set_ylim(0, 1.03)
        shares.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        _line(speed, [(found.step, found.speedup) for found in history], 0, None)
        speed.axhline(1, color=SOFT, linewidth=1)
        speed.set_ylabel("expected speed-up\nover plain")
        speed.set_xlabel("steps")
        for panel in (losses, shares, speed):
            kept = "the draft that was kept" if panel is losses else None
            panel.axvline(training.best_step, color=INK, linewidth=1.2, linestyle=":", label=kept)
        for panel in (losses, shares):
            panel.legend(loc="best")
        speed.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))

    head, body = draw("distill-training", 560, 640, alternative, paint).split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{_COLOURS}{body}\n'


def _line(axes: Axes, points: Sequence[tuple[float, float]], number: int, label: str | None) -> None:
    style = {"color": SERIES[number], "marker": MARKERS[number], "linestyle": STYLES[number]}
    axes.plot(*zip(*points, strict=True), **style, markersize=4, label=label)  # type: ignore[arg-type]
