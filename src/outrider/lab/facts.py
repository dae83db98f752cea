"""What is known of models before a token is generated: their files, their calls, how their vocabularies line
up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import Keys

from outrider.core.contracts import Vocabulary
from outrider.costs import MAX_TOKENS, CallCosts, break_even
from outrider.lab.record import Answer
from outrider.models.gguf import ModelCard
from outrider.models.header import TensorInfo, read_header
from outrider.models.reference import local_shards
from outrider.models.vocab import Alignment, AlignmentReport

_SIZES = (1, 2, 4, 8, 16)
_DRAFTED = (1, 3, 8)
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_EXPERTS = "_exps."


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's file. `bytes_per_token` are the weights that a call over one token reads, `memory_bytes` what
    the model added to this process, None where the system does not say."""

    name: str
    path: str
    architecture: str
    quantization: str
    parameters: int
    active_parameters: int
    experts: int
    experts_used: int
    file_bytes: int
    bytes_per_token: int
    trained_context: int | None
    memory_bytes: int | None = None
    library: str = ""
    """what runs it here, and why"""


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls cost: `call_s` over one token, `ratios` by number of tokens against that."""

    call_s: float
    ratios: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From which acceptance drafts of so many tokens are no slower than plain decoding; None: never."""

    drafted_tokens: int
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """How two vocabularies line up. `lost_tokens` of the target's text tokens the draft cannot offer; they
    are `lost_ratio` of the tokens of the recorded answers. A `reduced` draft knows a part of the target's
    tokens by design."""

    usable: bool
    identical: bool
    reduced: bool
    target_tokens: int
    draft_tokens: int
    common_tokens: int
    text_ratio: float
    cut_ratio: float
    lost_tokens: int
    lost_ratio: float | None
    differences: tuple[str, ...]
    why_not: str | None


def model_facts(name: str, card: ModelCard, memory_bytes: int | None) -> ModelFacts:
    """A model's card as the report shows it. Raises ModelFileError for a file that can no longer be read."""
    return ModelFacts(
        name=name,
        path=str(card.path),
        architecture=card.architecture,
        quantization=card.quantization,
        parameters=card.parameters,
        active_parameters=card.active_parameters,
        experts=card.expert_count,
        experts_used=card.expert_used_count,
        file_bytes=card.file_bytes,
        bytes_per_token=bytes_read(card),
        trained_context=card.context_length,
        memory_bytes=memory_bytes,
    )


def bytes_read(card: ModelCard) -> int:
    """Bytes of weights that a call over a single token reads: all, without the experts that the token passes
    by, and without the embedding where that is only looked up, not multiplied with.

    Raises ModelFileError for a file that can no longer be read.
    """
    headers = [read_header(file) for file in local_shards(Path(card.path))]
    tensors = [tensor for header in headers for tensor in header.tensors]
    used = headers[0].number(Keys.LLM.EXPERT_USED_COUNT.format(arch=card.architecture)) or 0
    has_output = any(tensor.name == _OUTPUT for tensor in tensors)
    per_parameter = card.file_bytes / max(card.parameters, 1)
    return sum(
        _read_of(tensor, used, per_parameter)
        for tensor in tensors
        if not (has_output and tensor.name == _EMBEDDING)
    )


def _read_of(tensor: TensorInfo, used: int, per_parameter: float) -> int:
    size = tensor.num_bytes
    whole = round(tensor.num_parameters * per_parameter) if size is None else size
    experts = tensor.shape[-1] if _EXPERTS in tensor.name and tensor.shape else 0
    return whole * used // experts if 0 < used < experts else whole


def calls_of(costs: CallCosts) -> Calls:
    """What calls over a few tokens cost at an empty context."""
    calls_s = costs.calls_s(max(_SIZES), context=0)
    return Calls(float(calls_s[0]), {n: float(calls_s[n - 1] / calls_s[0]) for n in _SIZES})


def break_evens(costs: CallCosts, draft: CallCosts | None = None) -> tuple[BreakEven, ...]:
    """By draft length, the acceptance from which drafts pay: looked-up ones, or a draft model's."""
    return tuple(BreakEven(n, _needed(costs, draft, n)) for n in _DRAFTED)


def least_needed(costs: CallCosts, draft: CallCosts) -> float | None:
    """The least acceptance at which a draft model pays at some length; None where it pays at none."""
    needed = [_needed(costs, draft, n) for n in range(1, 2 * max(_DRAFTED) + 1)]
    return min((value for value in needed if value is not None), default=None)


def _needed(costs: CallCosts, draft: CallCosts | None, num_drafted: int) -> float | None:
    drafting_s = 0.0
    if draft is not None:
        # The first call of a round reads the target's own last token along.
        drafting_s = draft.call_s(2, context=0) + (num_drafted - 1) * draft.call_s(1, context=0)
    return break_even(costs.calls_s(MAX_TOKENS, context=0), num_drafted, drafting_s)


def tokenizers_of(alignment: Alignment, target: Vocabulary, answers: Sequence[Answer]) -> Tokenizers:
    """How a pair lines up, and how much of these answers the draft cannot offer."""
    report = alignment.report
    lost = [
        token for token in np.flatnonzero(alignment.to_draft < 0).tolist() if not target.is_control(token)
    ]
    missing = set(lost)
    tokens = [token for answer in answers for token in answer.row.tokens]
    return Tokenizers(
        usable=report.usable,
        identical=alignment.identical,
        reduced=report.is_reduced,
        target_tokens=report.target_tokens,
        draft_tokens=report.draft_tokens,
        common_tokens=report.common_tokens,
        text_ratio=report.text_ratio,
        cut_ratio=report.cuts.ratio,
        lost_tokens=len(lost),
        lost_ratio=sum(token in missing for token in tokens) / len(tokens) if tokens else None,
        differences=tuple(map(str, report.differences)),
        why_not=tokenizer_fault(report),
    )


def tokenizer_fault(report: AlignmentReport) -> str | None:
    """Why the draft's tokenizer does not do for the target; None where it does."""
    if report.usable:
        return None
    if report.map_fault is not None:
        return report.map_fault
    kinds = f"the tokenizers do not line up ({report.target_kind}; {report.draft_kind})"
    if report.common_text_tokens < report.text_tokens:
        kinds += f": {report.common_text_tokens:,} of {report.text_tokens:,} text tokens agree"
    return f"{kinds}, and {report.cuts.ratio:.0%} of sample text is cut alike"
