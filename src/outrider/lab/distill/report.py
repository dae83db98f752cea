"""What a distillation found, as plain data: `report.json`.

Shares are 0 to 1, speed-ups factors, times seconds. Intervals hold 95 %; an end that is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.core.files import write_whole
from outrider.lab.check import Report as Checked
from outrider.lab.distill.plan import Start

SCHEMA = "outrider.distill/1"


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
    where its most likely token is the target's; `speedup`: expected at the measured costs.
    """

    step: int
    train_loss: float | None
    loss: float
    acceptance: float
    agreement: float
    speedup: float

    @property
    def rank(self) -> tuple[float, float]:
        """The higher, the better: expected speed, and where no draft pays at these costs, agreement."""
        return self.speedup, self.agreement


@dataclass(frozen=True, slots=True)
class Training:
    """`trained_tokens`: labelled positions, each as often as it was trained on; `seconds`: of the whole run,
    the answers included, as far as it was made by this call."""

    steps: int
    best_step: int
    trained_tokens: int
    learning_rate: float
    batch_tokens: int
    on_policy: float
    seed: int
    start: Start
    seconds: float
    history: Sequence[Evaluation]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `measured` are the files on held-out prompts through llama.cpp, as `outrider check` judges
    them: the draft, the same untrained ("first") and the one that it was continued from; None where no report
    was asked for."""

    outrider: str
    target: str
    target_name: str
    draft: Draft
    data: Data
    training: Training
    notices: Sequence[str] = ()
    measured: Checked | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}


def write_report(report: Report, folder: Path) -> Path:
    """Write report.json; its path. Raises SettingError."""
    write_whole(folder / "report.json", json.dumps(report.as_json(), indent=1) + "\n", "report")
    return folder / "report.json"
