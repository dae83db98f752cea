"""What a step evaluates of a sequence before its draft: its last token, and what the target lost.

A target of checkpoints goes back to where a rejected draft's call began. The accepted tokens of that call are
evaluated again with the next one. A rejection then would lose these too, so that few of them may come
together.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.core.contracts import Model
from outrider.core.data import Draft, Span
from outrider.engine.sequence import RunningRequest, StepPlan

MAX_REREAD = 8
"""Where more tokens than this are evaluated again nothing is drafted."""
_MAX_CALL_TOKENS = 64
"""of a sequence that may have to be evaluated again"""
_TURN_TOKENS, _MIN_PROMPT = 16, 64
"""The checkpoint in a prompt of so many tokens or more lies so many before its end."""


def reread(target: Model, sequence: RunningRequest) -> int:
    """Tokens of a sequence, its last one not among them, that are not stored."""
    return len(sequence.tokens) - 1 - target.length(sequence.slot)


def decodes(target: Model, sequence: RunningRequest, num_running: int) -> bool:
    """Whether a sequence decodes in this step, rather than going on with its prompt."""
    missing = reread(target, sequence)
    if not missing or not sequence.num_generated or target.rewind != "checkpoints":
        return not missing
    return missing < min(_MAX_CALL_TOKENS, target.max_batch_tokens // num_running)


def max_draft(target: Model, sequence: RunningRequest, max_tokens: int) -> int:
    """The longest draft that the target can take back, in a call of up to `max_tokens` tokens of the
    sequence."""
    if target.rewind != "checkpoints":
        return target.max_draft
    missing = reread(target, sequence)
    if missing and not sequence.num_generated:  # a rejection would lose the end of the prompt
        return 0
    return max_draft_after(missing, max_tokens)


def max_draft_after(missing: int, max_tokens: int = _MAX_CALL_TOKENS) -> int:
    """The longest draft in a call that evaluates so many tokens again."""
    return min(_MAX_CALL_TOKENS, max_tokens) - 1 - missing if missing <= MAX_REREAD else 0


def verification(target: Model, sequence: RunningRequest) -> StepPlan:
    """A decoding sequence's part in the call, but for its draft."""
    stored = target.length(sequence.slot)
    return StepPlan(sequence, Span(sequence.slot, tuple(sequence.tokens[stored:]), stored, 1), Draft())


def with_draft(plan: StepPlan, draft: Draft | None) -> StepPlan:
    """The same part with a draft after it."""
    if not draft:
        return plan
    span = replace(plan.span, tokens=plan.span.tokens + draft.tokens, rows=1 + len(draft), checkpoint=True)
    return replace(plan, span=span, draft=draft)


def reading(target: Model, sequence: RunningRequest, size: int, may_end: bool) -> StepPlan:
    """The part in the call of a sequence that reads `size` tokens of its prompt. Where these are all but the
    last one, that one joins them if it `may`, so that the call gives the first token of the text."""
    stored = target.length(sequence.slot)
    ends = may_end and size == reread(target, sequence)
    tokens = tuple(sequence.tokens[stored : stored + size + ends])
    checkpoint = stored == checkpoint_at(target, sequence)
    span = Span(sequence.slot, tokens, stored, int(ends), checkpoint)
    return StepPlan(sequence, span, Draft(), size) if ends else StepPlan(sequence, span, None)


def unread(target: Model, sequence: RunningRequest) -> int:
    """Tokens of a prompt to read before its sequence decodes, or before a checkpoint in it."""
    to_checkpoint = checkpoint_at(target, sequence) - target.length(sequence.slot)
    return to_checkpoint if to_checkpoint > 0 else reread(target, sequence)


def checkpoint_at(target: Model, sequence: RunningRequest) -> int:
    """Where in a prompt a target of checkpoints makes one. The next turn of a conversation begins like this
    prompt, but for what its template puts before an answer."""
    size = len(sequence.request.prompt)
    return size - _TURN_TOKENS if target.rewind == "checkpoints" and size >= _MIN_PROMPT else 0
