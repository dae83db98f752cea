"""The state of one running request, what it puts into a step's call, and what becomes of it: verify, append
what is accepted, record the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from time import perf_counter
from typing import cast

from outrider.core.contracts import Model
from outrider.core.data import (
    TARGET,
    Completion,
    Draft,
    DraftWork,
    FinishReason,
    Logits,
    Piece,
    Request,
    Span,
    StepRecord,
    TokenLogprob,
    Update,
    Verdict,
    content_of,
)
from outrider.core.errors import OutriderError
from outrider.engine.limits import PreferredConstraint, ThoughtLimit
from outrider.engine.text import TextStream
from outrider.sampling import LazyDistributions, RequestSampler, score_tokens
from outrider.verify import Verifier

_MAX_CALL_TOKENS = 64
"""of a sequence that decodes"""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """The state of one running request."""

    request: Request
    id: int
    slot: int
    tokens: list[int]
    """committed: the prompt and everything emitted"""
    reused_tokens: int
    turns: list[int]
    """numbers of its prompt's tokens after which a copy of the target's state is to be kept, ascending"""
    seed: int
    constraint: PreferredConstraint | None
    sampler: RequestSampler
    verifier: Verifier
    text: TextStream
    started_s: float
    updates: list[Update] = field(default_factory=list)
    thought: ThoughtLimit | None = None
    """the part of the constraint that limits its reasoning"""
    unshown: tuple[Piece, ...] = ()
    """what a cancelled request had not shown yet"""
    finish_reason: FinishReason | None = None
    error: OutriderError | None = None
    """why it could not go on"""

    def lift_limit(self) -> None:
        """From the next token on the output may be anything."""
        self.constraint = self.thought = None
        self.sampler.constrain(None)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_remaining(self) -> int | None:
        limit = self.request.max_tokens
        return None if limit is None else limit - self.num_generated


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one sequence puts into the step's target call."""

    sequence: RunningRequest
    span: Span
    draft: Draft | None
    """None for a chunk of the prompt that is not its last"""
    read_tokens: int = 0
    """tokens of the prompt's last chunk, the last one not among them"""

    @property
    def reads(self) -> bool:
        return self.draft is None or self.read_tokens > 0


@dataclass(frozen=True, slots=True)
class Verified:
    """The verdict on one sequence's draft; none on a chunk of the prompt."""

    verdict: Verdict | None = None
    sampling_s: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    error: OutriderError | None = None
    """why nothing can follow the accepted tokens"""


@dataclass(slots=True)
class Shared:
    """What all sequences of a step share: wall times in seconds, the drafters' work, the call's size."""

    start_s: float
    propose_s: float = 0.0
    verify_s: float = 0.0
    work: DraftWork = field(default_factory=DraftWork)
    num_sequences: int = 0
    num_decoding: int = 0
    """tokens of the call that are neither drafts nor of prompts"""
    batch_tokens: int = 0
    """tokens of all sequences in the target call"""
    num_drafted: int = 0
    """drafted ones among them"""


def complete(sequence: RunningRequest) -> Completion:
    """The outcome of a sequence that has ended."""
    prompt_tokens = len(sequence.request.prompt)
    return Completion(
        text="".join(update.text for update in sequence.updates) + content_of(sequence.unshown),
        tokens=tuple(sequence.tokens[prompt_tokens:]),
        finish_reason=cast(FinishReason, sequence.finish_reason),
        prompt_tokens=prompt_tokens,
        reused_tokens=sequence.reused_tokens,
        seed=sequence.seed,
        rule=sequence.verifier.name,
        records=tuple(update.record for update in sequence.updates),
        # A stop string cuts off what the constraint has seen.
        is_complete=sequence.constraint is None
        or (sequence.text.stopped is None and sequence.constraint.is_accepted),
        stop=sequence.text.stopped,
        respelled_tokens=sequence.request.respelled_tokens,
        kinds=sequence.text.kinds,
        rest=sequence.unshown,
    )


# What a sequence puts into a call. A target may have lost tokens with a rejected draft (`Rewinding`): these
# are evaluated again, before the last one.


def num_missing(target: Model, sequence: RunningRequest) -> int:
    """Tokens of a sequence, its last one not among them, that are not stored."""
    return len(sequence.tokens) - 1 - target.length(sequence.slot)


def decodes(target: Model, sequence: RunningRequest, num_running: int) -> bool:
    """Whether a sequence decodes in this step, rather than going on with its prompt."""
    missing = num_missing(target, sequence)
    if not missing or not sequence.num_generated:
        return not missing
    return missing < min(_MAX_CALL_TOKENS, target.max_batch_tokens // num_running)


def verification(target: Model, sequence: RunningRequest) -> StepPlan:
    """A decoding sequence's part in the call, but for its draft."""
    stored = target.length(sequence.slot)
    tokens, is_turn = tuple(sequence.tokens[stored:]), stored in sequence.turns
    span = Span(sequence.slot, tokens, stored, 1, top=_top(sequence), is_turn=is_turn)
    return StepPlan(sequence, span, Draft())


def _top(sequence: RunningRequest) -> int:
    request, sampler = sequence.request, sequence.sampler
    needs_rows = request.logprobs is not None or sampler.adjusts(())
    return 0 if needs_rows else sampler.top


def with_draft(plan: StepPlan, draft: Draft | None) -> StepPlan:
    """The same part with a draft after it."""
    if not draft:
        return plan
    last = plan.span
    span = Span(
        last.sequence, last.tokens + draft.tokens, last.start, 1 + len(draft), True, last.top, last.is_turn
    )
    return StepPlan(plan.sequence, span, draft, plan.read_tokens)


def reading(target: Model, sequence: RunningRequest, size: int, may_end: bool) -> StepPlan:
    """The part in the call of a sequence that reads `size` tokens of its prompt. Where these are all but the
    last one, that one joins them if it `may`, so that the call gives the first token of the text."""
    stored = target.length(sequence.slot)
    ends = may_end and size == num_missing(target, sequence) and stored + size not in sequence.turns
    tokens = tuple(sequence.tokens[stored : stored + size + ends])
    is_turn = stored in sequence.turns
    span = Span(sequence.slot, tokens, stored, int(ends), top=_top(sequence), is_turn=is_turn)
    return StepPlan(sequence, span, Draft(), size) if ends else StepPlan(sequence, span, None)


def unread(target: Model, sequence: RunningRequest) -> int:
    """Tokens of a prompt to read before its sequence decodes, or before its next turn."""
    stored = target.length(sequence.slot)
    return next((turn - stored for turn in sequence.turns if turn > stored), num_missing(target, sequence))


# From the target's logits to committed tokens


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
    sequence: RunningRequest, draft: Draft, verdict: Verdict, logprobs: Sequence[TokenLogprob], target: Model
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
