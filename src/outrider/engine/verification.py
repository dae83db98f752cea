"""From the target's logits to committed tokens: verify, append what is accepted, record the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from time import perf_counter

from outrider.core.contracts import Model
from outrider.core.data import TARGET, Draft, FinishReason, Logits, Piece, StepRecord, TokenLogprob, Verdict
from outrider.core.errors import OutriderError
from outrider.engine.sequence import RunningRequest, Shared, StepPlan, Verified
from outrider.sampling import LazyDistributions, score_tokens


def verify(plan: StepPlan, logits: Logits) -> Verified:
    """The verdict on a draft; none for a chunk of the prompt. Unusable logits end this request alone."""
    if plan.draft is None:
        return Verified()
    try:
        return _verify_draft(plan.sequence, plan.draft, logits)
    except OutriderError as error:
        return Verified(Verdict(0, None, "deferred"), error=error)


def _verify_draft(sequence: RunningRequest, draft: Draft, logits: Logits) -> Verified:
    before = perf_counter()
    rows = LazyDistributions(logits, sequence.sampler, draft.tokens)
    verdict, error = sequence.verifier.verify(rows, draft, sequence.num_generated), None
    if rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted:
        verdict, error = Verdict(verdict.num_accepted, None, "deferred"), rows.dead_end[1]
    emitted = draft.tokens[: verdict.num_accepted]
    emitted += () if verdict.token is None else (verdict.token,)
    wanted = sequence.request.logprobs
    logprobs = () if wanted is None else score_tokens(logits, rows, emitted, wanted)
    return Verified(verdict, perf_counter() - before, logprobs, error)


def commit(
    sequence: RunningRequest,
    draft: Draft,
    verdict: Verdict,
    logprobs: Sequence[TokenLogprob],
    target: Model,
) -> Iterator[Piece]:
    """Append the accepted tokens and the target's own, up to where the text ends; yields what may be shown.

    Raises ConstraintError where a constraint cannot read them.
    """
    emitted = [(item.token, item.source) for item in draft.items[: verdict.num_accepted]]
    if verdict.token is not None:
        emitted.append((verdict.token, TARGET))
    for (token, source), logprob in zip_longest(emitted, logprobs):
        if sequence.constraint is not None:
            sequence.constraint.accept((token,))
        if sequence.thought is not None and sequence.thought.was_forced:
            sequence.text.end_was_forced()
        sequence.tokens.append(token)
        yield from sequence.text.push(token, source, logprob)
        sequence.finish_reason = _finish_reason(sequence, token, target)
        if sequence.finish_reason is not None:
            yield from sequence.text.flush()
            if sequence.text.stopped is not None:  # only now is it certain
                sequence.finish_reason = "stop"
            break


def _finish_reason(sequence: RunningRequest, token: int, target: Model) -> FinishReason | None:
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


def fail(sequence: RunningRequest, error: OutriderError) -> list[Piece]:
    """End a request that cannot go on; what was produced stays."""
    sequence.error, sequence.finish_reason = error, "error"
    return sequence.text.flush()


def record_of(plan: StepPlan, step: int, position: int, verified: Verified, shared: Shared) -> StepRecord:
    """The record of one sequence's share of a step that it began with `position` tokens."""
    sequence, verdict = plan.sequence, verified.verdict
    tokens = tuple(sequence.tokens[position:])
    now = perf_counter()
    known_s = shared.propose_s + shared.verify_s + verified.sampling_s
    num_tokens = len(plan.span.tokens)
    read_s = shared.verify_s * plan.read_tokens / num_tokens
    return StepRecord(
        request=sequence.id,
        step=step,
        kind="prefill" if plan.draft is None else "decode",
        position=position,
        num_evaluated=num_tokens - plan.read_tokens,
        draft=plan.draft or Draft(),
        num_accepted=min(verdict.num_accepted, len(tokens)) if verdict else 0,
        tokens=tokens,
        work=shared.work,
        draft_s=shared.propose_s - shared.work.prefill_s,
        verify_s=shared.verify_s - read_s,
        sampling_s=verified.sampling_s,
        other_s=now - shared.start_s - known_s,
        end_s=now - sequence.started_s,
        num_sequences=shared.num_sequences,
        batch_tokens=shared.batch_tokens,
        batch_drafted=shared.num_drafted,
        read_tokens=plan.read_tokens,
        read_s=read_s,
        constraint_s=sequence.constraint.take_time() if sequence.constraint else 0.0,
        finish_reason=sequence.finish_reason,
        logprobs=verified.logprobs[: len(tokens)],
    )
