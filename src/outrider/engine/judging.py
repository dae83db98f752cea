"""What the target makes of each sequence's draft."""

from __future__ import annotations

from time import perf_counter

from outrider.core.data import Draft, Logits, Verdict
from outrider.core.errors import OutriderError
from outrider.engine.sequence import Judged, Plan, Sequence
from outrider.sampling import LazyDistributions, score_tokens

__all__ = ["judge"]


def judge(plan: Plan, logits: Logits) -> Judged:
    """The verdict on a draft; none for a chunk of the prompt. Logits that cannot be used are this
    request's error alone."""
    if plan.draft is None:
        return Judged()
    try:
        return _judge_draft(plan.sequence, plan.draft, logits)
    except OutriderError as error:
        return Judged(Verdict(0, None, "deferred"), error=error)


def _judge_draft(sequence: Sequence, draft: Draft, logits: Logits) -> Judged:
    before = perf_counter()
    rows = LazyDistributions(logits, sequence.sampler, draft.tokens)
    verdict, error = sequence.judge.judge(rows, draft, sequence.num_generated), None
    if rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted:
        verdict, error = Verdict(verdict.num_accepted, None, "deferred"), rows.dead_end[1]
    emitted = draft.tokens[: verdict.num_accepted]
    emitted += () if verdict.token is None else (verdict.token,)
    wanted = sequence.request.logprobs
    logprobs = () if wanted is None else score_tokens(logits, rows, emitted, wanted)
    return Judged(verdict, perf_counter() - before, logprobs, error)
