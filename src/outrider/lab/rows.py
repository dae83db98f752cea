"""What a sweep writes down, one JSON line each: the only source of its reports and exports.

Every row names its kind. Times are seconds, lengths tokens, sizes bytes. A run that is gone on with adds
rows; nothing is ever changed. Rows of a block (`BlockRow`) count only when the block is complete.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.core.data import FinishReason
from outrider.costs import CallCosts
from outrider.lab.recording import Offers

SCHEMA = "outrider.bench/1"

Role = Literal["target", "draft"]


class _Row(BaseModel):
    """A row; what older runs wrote beside its fields is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class HeadRow(_Row):
    """The first row: what was measured on, and what was asked for."""

    kind: Literal["head"] = "head"
    schema_version: str = SCHEMA
    started: str
    machine: dict[str, Any]
    """`cpu`, `physical_cores`, `devices`, `memory_bytes`, `python`, `outrider`, `commit`, `llama_cpp`"""
    plan: dict[str, Any]
    prompts: dict[str, str] = {}


class ModelRow(_Row):
    """A model file that takes part."""

    kind: Literal["model"] = "model"
    model: str
    """its short name within the sweep, by which all other rows call it"""
    role: Role
    path: str
    fingerprint: str
    architecture: str
    quantization: str
    parameters: int
    active_parameters: int
    file_bytes: int
    trained_context: int | None
    effective: dict[str, Any]
    """the load options in force: threads, GPU layers, batch sizes"""
    backend: str = ""
    """the native library that ran it: "llama.cpp" or "ik"; empty where a run does not say"""
    beside: str | None = None


class PairRow(_Row):
    """How the tokenizers of a target and a draft line up."""

    kind: Literal["pair"] = "pair"
    target: str
    draft: str
    usable: bool
    identical: bool
    common_tokens: int
    text_ratio: float
    cut_ratio: float
    reduced_from: int | None = None
    """how many tokens the target has, where the draft knows a part of them by design"""
    why_not: str | None = None
    """why the draft takes no part with this target"""
    prior: dict[str, Any] | None = None
    """what the draft's file says of its acceptance"""


class AnswerRow(_Row):
    """The target's own answer to one case, decoded plainly: the recording that everything is replayed on."""

    kind: Literal["answer"] = "answer"
    target: str
    workload: str
    case: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prefill_s: float
    decode_s: float
    calls: tuple[tuple[int, int, float, float], ...] = ()
    """of each target call, those of probing included: its tokens, its context, its seconds, and the
    engine's own seconds in that step"""
    seed: int


class CostsRow(_Row):
    """What calls of one model cost, and the engine's own time beside them."""

    kind: Literal["costs"] = "costs"
    model: str
    role: Role
    curve: dict[str, Any]
    own_s: dict[str, float] = {}
    """the engine's own seconds in a step, by who drafted: "plain", "lookup", "auto", "draft" """
    own_token_s: float = 0.0
    """and for each drafted token that was verified"""
    beside: str | None = None
    """the target that a draft model was measured beside"""

    def costs(self) -> CallCosts:
        return CallCosts.from_json(self.curve, f"costs of {self.model}")


class OffersRow(_Row):
    """What a draft model offers at every position of an answer."""

    kind: Literal["offers"] = "offers"
    target: str
    draft: str
    workload: str
    case: str
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    departures: dict[int, tuple[tuple[int, float], ...]]
    block: int = 1
    seconds: float

    def offers(self) -> Offers:
        return Offers(self.tokens, self.confidence, self.departures, self.block)


class _Counted(BaseModel):
    """What a setting made of one case."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    case: str
    tokens: int
    target_calls: int
    draft_calls: int
    drafted: tuple[int, ...]
    """tokens drafted at the first, second, … place of a draft"""
    accepted: tuple[int, ...]
    draft_s: float = 0.0
    """the draft model's calls (its reading of the prompt included)"""
    verify_s: float = 0.0
    """the target's calls"""


class CaseOutcome(_Counted):
    """Of a prediction. `seconds` is decoding, the draft model's reading of the prompt included."""

    seconds: float
    plain_s: float


class PredictionRow(_Row):
    """What replay says of one setting under one workload."""

    kind: Literal["prediction"] = "prediction"
    target: str
    draft: str | None = None
    workload: str
    setting: str
    cases: tuple[CaseOutcome, ...]


class RunRow(_Row, _Counted):
    """One request that ran for real.

    `decode_s` starts when the target has read the prompt and includes the draft model's own reading of it.
    """

    kind: Literal["run"] = "run"
    block: str
    target: str
    draft: str | None = None
    setting: str
    workload: str
    repetition: int
    order: int
    """its place in the block's shuffled order"""
    prefill_s: float
    decode_s: float
    forced: int = 0
    """accepted tokens that a grammar forced"""
    equal: bool | None = None
    """whether the tokens are those of the recorded answer; None when sampled"""
    divergence: int | None = None
    finish_reason: str = ""
    seed: int | None = None
    started_s: float = 0.0


class BlockRow(_Row):
    """A block of runs that is complete: all its settings, one repetition. Only then do its rows count."""

    kind: Literal["block"] = "block"
    block: str
    target: str
    workload: str
    repetition: int


class SkippedRow(_Row):
    """Something that takes no part, and why, such as a pair that does not line up."""

    kind: Literal["skipped"] = "skipped"
    what: str
    why: str


class DoneRow(_Row):
    """Everything about a target is there, its real runs so often."""

    kind: Literal["done"] = "done"
    target: str
    repetitions: int


Row = Annotated[
    HeadRow
    | ModelRow
    | PairRow
    | AnswerRow
    | CostsRow
    | OffersRow
    | PredictionRow
    | RunRow
    | BlockRow
    | SkippedRow
    | DoneRow,
    Field(discriminator="kind"),
]
