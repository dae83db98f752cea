"""What a trim made and found, as plain data. Seconds, bytes, tokens; ratios are 0-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.lab.judged import DraftReport
from outrider.lab.models import ModelFacts
from outrider.lab.statistics import Interval

SCHEMA = "outrider.trim/1"


@dataclass(frozen=True, slots=True)
class Measured:
    """A draft on held-out answers: the time of a step, how often its most likely token is the target's, and
    the expected speed-up over plain decoding: with lookup, by the draft model alone, by lookup alone.
    `judged` has more."""

    step_s: float
    agreement: Interval
    with_lookup: Interval
    without_lookup: Interval
    lookup_alone: Interval
    judged: DraftReport


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
    """Everything that a trim made and found; of the `types` that were tried `quantization` was kept."""

    path: str
    file_bytes: int
    source: ModelFacts
    target: ModelFacts
    source_sha256: str
    counted: tuple[str, ...]
    known_tokens: int
    source_tokens: int
    sizes: tuple[Choice, ...]
    types: tuple[Tried, ...]
    quantization: str
    before: Measured
    after: Measured
    is_useful: bool
    verdict: str
    advice: tuple[str, ...]
    notices: tuple[str, ...]
    seconds: float

    @property
    def step_ratio(self) -> float:
        """A step's time against what it was."""
        return self.after.step_s / self.before.step_s

    @property
    def agreement_ratio(self) -> float:
        """The agreement against what it was."""
        return self.after.agreement.value / max(self.before.agreement.value, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON: an unknown end of an interval is None."""
        ratios = {"step_ratio": self.step_ratio, "agreement_ratio": self.agreement_ratio}
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null"), **ratios}
