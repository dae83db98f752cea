"""What a check found, as plain data. Seconds, bytes, tokens; ratios are of target steps or of plain
decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from outrider.core.contracts import RewindKind
from outrider.lab.facts import BreakEven, Calls
from outrider.lab.judged import DraftReport
from outrider.lab.models import ModelFacts
from outrider.lab.predict import Speedups
from outrider.lab.verdict import DraftVerdict
from outrider.session.drafts import FoundFile

SCHEMA = "outrider.check/1"


@dataclass(frozen=True, slots=True)
class Rewind:
    """Whether the model can take tokens back, and what a call over one token takes: after the last token,
    and after rejected tokens were taken back (None: not measured)."""

    kind: RewindKind
    call_s: float | None
    rewound_call_s: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The recorded answers: how many of each workload, and how fast plain decoding made them."""

    answers: int
    tokens: int
    workloads: Mapping[str, int]
    plain_tokens_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LookupReport:
    """Lookup alone. `drafted` tokens were looked up by the automatic choice, `accepted` of them were
    right."""

    break_even: tuple[BreakEven, ...]
    drafted: int
    accepted: int
    speedups: Speedups
    verdict: DraftVerdict


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a check found; `pays` is the exit status as a question."""

    machine: str
    target: ModelFacts
    rewind: Rewind
    calls: Calls
    sample: Sample | None
    lookup: LookupReport | None
    drafts: tuple[DraftReport, ...]
    verdict: str
    pays: bool
    notices: tuple[str, ...]
    seconds: float
    backend: str = ""
    """the native library that all of it was measured with"""
    library_to_take: str = ""
    """which one to take, in a sentence; empty where they were not compared"""
    found: tuple[FoundFile, ...] = ()
    """what could draft, where no draft was named"""

    def as_json(self) -> dict[str, Any]:
        """Plain data, for JSON: an unknown end of an interval is None."""
        return {"schema": SCHEMA, **to_jsonable_python(self, inf_nan_mode="null")}
