"""What step records tell of a generation: counts and times (docs/json.md defines each).

Plain decoding would have made a call for each token that a drafter got emitted in front of the last one of
its step (`calls_saved`); the step's own call counts for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.data import Completion, StepRecord


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """What one drafter, or all together, drafted, and how much was accepted."""

    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    calls_saved: int


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Decoding time in seconds."""

    draft: float
    draft_model: float
    verify: float
    sampling: float
    other: float
    constraint: float


@dataclass(frozen=True, slots=True)
class Readout:
    """The counts and times of one generation."""

    finish_reason: str
    complete: bool
    rule: str
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    generated_tokens: int
    prefill_calls: int
    draft_prefill_calls: int
    target_calls: int
    draft_calls: int
    tokens_per_target_call: float
    target_calls_saved: float
    drafted_tokens: int
    drawn_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    acceptance_by_position: tuple[float | None, ...]
    drafters: dict[str, DrafterCounts]
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    time_s: DecodeTime
    constraint_share: float
    overhead: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_out(completion: Completion) -> Readout:
    """The readout of a finished generation."""
    decode = [record for record in completion.records if record.kind == "decode"]
    prefill = [record for record in completion.records if record.kind == "prefill"]
    generated = len(completion.tokens)
    overall = _count(decode, None)
    names = sorted({source for record in decode for source in record.draft.sources})
    time = DecodeTime(
        draft=sum(record.draft_s for record in decode),
        draft_model=sum(record.work.model_s for record in decode),
        verify=sum(record.verify_s for record in decode),
        sampling=sum(record.sampling_s for record in decode),
        other=sum(record.other_s for record in decode),
        constraint=sum(record.constraint_s for record in decode),
    )
    decode_s = time.draft + time.verify + time.sampling + time.other
    return Readout(
        finish_reason=completion.finish_reason,
        complete=completion.is_complete,
        rule=completion.rule,
        prompt_tokens=completion.prompt_tokens,
        reused_tokens=completion.reused_tokens,
        read_tokens=sum(r.num_evaluated for r in prefill) + sum(r.read_tokens for r in decode),
        generated_tokens=generated,
        prefill_calls=len(prefill),
        draft_prefill_calls=sum(record.work.prefill_calls for record in completion.records),
        target_calls=len(decode),
        draft_calls=sum(record.work.calls for record in decode),
        tokens_per_target_call=_ratio(generated, len(decode)),
        target_calls_saved=1 - _ratio(len(decode), generated) if generated else 0.0,
        drafted_tokens=overall.drafted_tokens,
        drawn_tokens=sum(len(record.draft) for record in decode if record.draft.probs is not None),
        accepted_tokens=overall.accepted_tokens,
        acceptance_rate=overall.acceptance_rate,
        acceptance_by_position=overall.acceptance_by_position,
        drafters={name: _count(decode, name) for name in names},
        prefill_s=sum(r.total_s for r in prefill) + sum(r.work.prefill_s + r.read_s for r in decode),
        decode_s=decode_s,
        tokens_per_s=_ratio(generated, decode_s),
        time_s=time,
        constraint_share=_ratio(time.constraint, decode_s),
        overhead=_ratio(decode_s - time.verify - time.draft_model, decode_s),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _count(records: Sequence[StepRecord], drafter: str | None) -> DrafterCounts:
    drafted: list[int] = []
    accepted: list[int] = []
    saved = 0
    for record in records:
        for position, source in enumerate(record.draft.sources):
            if position == len(drafted):
                drafted.append(0)
                accepted.append(0)
            if drafter in (None, source):
                drafted[position] += 1
                accepted[position] += position < record.num_accepted
                saved += position < min(record.num_accepted, len(record.tokens) - 1)
    return DrafterCounts(
        drafted_tokens=sum(drafted),
        accepted_tokens=sum(accepted),
        acceptance_rate=sum(accepted) / sum(drafted) if sum(drafted) else None,
        acceptance_by_position=tuple(a / d if d else None for a, d in zip(accepted, drafted, strict=True)),
        calls_saved=saved,
    )
