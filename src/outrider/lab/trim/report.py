"""What a trim made and found, as plain data. Seconds, bytes, tokens; ratios are 0-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.core.numbers import Interval
from outrider.lab.check import DraftReport
from outrider.lab.models import ModelFacts

SCHEMA = "outrider.trim/1"


def step_s_of(report: DraftReport) -> float:
    """Seconds of a step of a draft that was measured."""
    assert report.calls is not None
    return report.calls.call_s


def agreement_of(report: DraftReport) -> Interval:
    """How often its most likely token is the target's."""
    assert report.acceptance is not None
    return report.acceptance.rate


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of the vocabulary: the share of the answers' tokens that it lacks, the time of a step, and the
    expected speed-up of the best draft length."""

    tokens: int
    lost_ratio: float
    step_s: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Tried:
    """The trimmed draft in one quantization; `speedup` is that of the best draft length without lookup."""

    quantization: str
    file_bytes: int
    step_s: float
    agreement: Interval
    speedup: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a trim made and found; of the `types` that were tried `quantization` was kept. `before`
    and `after` are the draft as `outrider check` judges it, on held-out answers."""

    path: str
    file_bytes: int
    source: ModelFacts
    target: ModelFacts
    counted: tuple[str, ...]
    known_tokens: int
    source_tokens: int
    sizes: tuple[Choice, ...]
    types: tuple[Tried, ...]
    quantization: str
    before: DraftReport
    after: DraftReport
    notices: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON: an unknown end of an interval is None."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}
