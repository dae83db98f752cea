"""What a verdict adds to its sequence: tokens, text, possibly an end, and the record of the step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import perf_counter

from outrider.core.contracts import Model
from outrider.core.data import TARGET, Draft, FinishReason, Piece, StepRecord, Verdict
from outrider.core.errors import OutriderError
from outrider.engine.sequence import Judged, Plan, Sequence, Shared

__all__ = ["commit", "fail", "record_of"]


def commit(sequence: Sequence, draft: Draft, verdict: Verdict, target: Model) -> Iterator[Piece]:
    """Append the tokens that stand, up to where the text ends; gives what may be shown. Raises
    ConstraintError where a constraint cannot read them."""
    offered = zip(draft.tokens, draft.sources, strict=True)
    standing = list(islice(offered, verdict.num_accepted))
    if verdict.token is not None:
        standing.append((verdict.token, TARGET))
    for token, source in standing:
        if sequence.constraint is not None:
            sequence.constraint.accept((token,))
        sequence.tokens.append(token)
        if text := sequence.text.push(token):
            yield Piece(text, source)
        sequence.finish_reason = _finish_reason(sequence, token, target)
        if sequence.finish_reason is not None:
            if text := sequence.text.flush():
                yield Piece(text, source)
            if sequence.text.stopped is not None:  # only now is it certain
                sequence.finish_reason = "stop"
            break


def _finish_reason(sequence: Sequence, token: int, target: Model) -> FinishReason | None:
    if sequence.text.stopped is not None:
        return "stop"
    if not sequence.request.ignore_end and target.vocabulary.ends_generation(token):
        return "stop"
    if sequence.constraint is not None and sequence.constraint.is_complete:
        return "stop"
    if sequence.num_remaining == 0:
        return "length"
    if len(sequence.tokens) >= target.context_length:
        return "context"
    return None


def fail(sequence: Sequence, error: OutriderError) -> list[Piece]:
    """End a request that cannot go on; what was produced stays."""
    sequence.error, sequence.finish_reason = error, "error"
    rest = sequence.text.flush()
    return [Piece(rest, TARGET)] if rest else []


def record_of(plan: Plan, step: int, position: int, judged: Judged, shared: Shared) -> StepRecord:
    """The record of one sequence's share of a step, which it began with `position` tokens."""
    sequence, verdict = plan.sequence, judged.verdict
    tokens = tuple(sequence.tokens[position:])
    now = perf_counter()
    known_s = shared.propose_s + shared.verify_s + judged.sampling_s
    return StepRecord(
        request=sequence.id,
        step=step,
        kind="prefill" if plan.draft is None else "decode",
        position=position,
        num_evaluated=len(plan.span.tokens),
        draft=plan.draft or Draft(),
        num_accepted=min(verdict.num_accepted, len(tokens)) if verdict else 0,
        tokens=tokens,
        work=shared.work,
        draft_s=shared.propose_s - shared.work.prefill_s,
        verify_s=shared.verify_s,
        sampling_s=judged.sampling_s,
        other_s=now - shared.start_s - known_s,
        end_s=now - sequence.started_s,
        num_sequences=len(shared.plans),
        batch_tokens=shared.batch_tokens,
        batch_drafted=sum(len(plan.draft or ()) for plan in shared.plans),
        constraint_s=sequence.constraint.take_time() if sequence.constraint else 0.0,
        finish_reason=sequence.finish_reason,
        logprobs=judged.logprobs[: len(tokens)],
    )
