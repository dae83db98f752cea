"""What a distillation found, as plain data: `report.json`.

Shares are 0 to 1, speed-ups factors, times seconds. Intervals hold 95 %; an end that is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.lab.statistics import Interval

if TYPE_CHECKING:
    from outrider.distill.run import Distilled
    from outrider.lab.models import ModelFile

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
    measured: Measured | None
    learning_curve: Curve | None
    notices: list[str]


def report_of(
    file: ModelFile,
    distilled: Distilled,
    measured: Measured | None,
    curve: Curve | None,
    notices: Sequence[str],
) -> Report:
    """Everything that a run found."""
    return Report(
        outrider=version("outrider"),
        target=str(file.path),
        target_name=file.name,
        draft=distilled.draft,
        data=distilled.data,
        training=distilled.training,
        measured=measured,
        learning_curve=curve,
        notices=list(dict.fromkeys(notices)),
    )
