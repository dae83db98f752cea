"""What the target makes of each sequence's draft."""

from __future__ import annotations

from time import perf_counter

from outrider.core.data import Draft, Logits, Verdict
from outrider.core.errors import OutriderError
from outrider.engine.sequence import Judged, Plan, Sequence, Shared
from outrider.sampling import LazyDistributions, score_tokens, top_gap

__all__ = ["judge"]


def judge(plan: Plan, logits: Logits, shared: Shared) -> Judged:
    """The verdict on a draft; none for a chunk of the prompt. Logits that cannot be used are this
    request's error alone."""
    if plan.draft is None:
        return Judged()
    try:
        return _judge_draft(plan.sequence, plan.draft, logits, shared)
    except OutriderError as error:
        return Judged(Verdict(0, None, "deferred"), error=error)


def _judge_draft(sequence: Sequence, draft: Draft, logits: Logits, shared: Shared) -> Judged:
    before = perf_counter()
    rows = LazyDistributions(logits, sequence.sampler, draft.tokens)
    verdict, error = _verdict(sequence, draft, rows, shared), None
    if rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted:
        verdict, error = Verdict(verdict.num_accepted, None, "deferred"), rows.dead_end[1]
    emitted = draft.tokens[: verdict.num_accepted]
    emitted += () if verdict.token is None else (verdict.token,)
    wanted = sequence.request.logprobs
    logprobs = () if wanted is None else score_tokens(logits, rows, emitted, wanted)
    return Judged(verdict, perf_counter() - before, logprobs, error)


def _verdict(sequence: Sequence, draft: Draft, rows: LazyDistributions, shared: Shared) -> Verdict:
    request = sequence.request
    verdict = sequence.judge.judge(rows, draft, sequence.num_generated)
    margin = request.verification.strict_margin
    if margin and shared.batch_tokens > 1 and request.sampling.is_greedy:
        verdict = _cut_where_close(verdict, rows, margin)
    return verdict


def _cut_where_close(verdict: Verdict, rows: LazyDistributions, margin: float) -> Verdict:
    """The verdict up to the first token whose two best logits lie closer than `margin`."""
    ends_there = rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted
    num_rows = verdict.num_accepted + (not ends_there)
    close = (i for i in range(num_rows) if top_gap(rows.row(i)) < margin)
    first = next(close, None)
    return verdict if first is None else Verdict(first, None, "deferred")
