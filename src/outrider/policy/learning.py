"""What a policy learns from the records of a step and what it had drafted for it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.data import StepRecord
from outrider.policy.choice import SequenceDraft
from outrider.policy.estimates import MEAN_CONFIDENCE_RATE, average_after
from outrider.policy.state import PolicyState, RequestState

_MIN_OBSERVED = 16
_PLAIN_INTERVAL = 8
"""Of calls without drafts, the most frequent ones, only so many are learned from once enough were seen:
learning takes a noticeable part of a small model's step."""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in λ: about the last 30 count"""


def learn_costs(state: PolicyState, records: Sequence[StepRecord], held: int) -> None:
    """What the calls of a step took, of a draft model that held so many tokens. Calls over prompts and drafts
    together tell nothing clear."""
    first, work = records[0], records[0].work
    decoding = [record for record in records if record.kind == "decode" and not record.read_tokens]
    context = sum(record.position for record in records)
    is_drafted = first.batch_tokens > len(records)
    if len(decoding) == len(records):
        is_new = state.costs.num_observed < _MIN_OBSERVED
        if is_drafted or is_new or first.step % _PLAIN_INTERVAL == 0:
            state.costs.observe(
                first.batch_tokens, first.verify_s, context=context, num_sequences=len(records)
            )
            state.draft_costs.follow(state.costs, held)
    elif not decoding:
        state.costs.observe_prefill(first.batch_tokens, first.verify_s + first.read_s, context=context)
    draft = state.draft_costs
    expected_s = [draft.call_s(n, context=held) for n in work.call_tokens]
    for n, seconds in zip(work.call_tokens, expected_s, strict=True):
        draft.observe(n, seconds * work.model_s / sum(expected_s), context=held)
    if not work.calls and first.step % _PLAIN_INTERVAL == 0:
        draft.relax(state.costs.drift)
    if work.prefill_calls:
        before = max(held - work.prefill_tokens, 0)
        draft.observe_prefill(work.prefill_tokens, work.prefill_s, context=before)
    if decoding:
        state.learn_own_time(decoding)


def plain_step_s(state: PolicyState, records: Sequence[StepRecord]) -> float | None:
    """What the step would have taken without drafts; None where prompts were read in it too."""
    if any(record.kind != "decode" or record.read_tokens for record in records):
        return None
    return state.plain_step_s(sum(record.position for record in records), len(records))


def learn_request(
    state: PolicyState,
    text: RequestState,
    draft: SequenceDraft | None,
    record: StepRecord,
    plain_s: float | None,
) -> None:
    """What became of `draft` in a decoding step of this request; `plain_s` is `plain_step_s`."""
    num_emitted, is_asked = len(record.tokens), draft is not None and draft.is_asked
    text.generated += num_emitted
    if plain_s is not None:  # what reading a prompt took says nothing about tokens
        step_s, memory = record.total_s - record.work.prefill_s, _TOKEN_MEMORY**num_emitted
        text.spent_s = text.spent_s * memory + step_s / record.num_sequences
        text.emitted = text.emitted * memory + num_emitted
        if is_asked:
            text.model_gain += num_emitted - step_s / plain_s
    _learn_drafted(state, text, draft, record)
    if draft is not None:
        _learn_lookup(state, text, draft, record)
        _learn_model(state, text, draft, record)


def _learn_drafted(
    state: PolicyState, text: RequestState, draft: SequenceDraft | None, record: StepRecord
) -> None:
    """The tokens that the target verified: the accepted ones, and the one that it replaced. Those of the
    draft model and those that lookups offered are learned below, drafted or not."""
    looked_up = [token.token for token in draft.candidate] if draft else []
    own = draft.offers[0][1].source if draft and draft.offers else None
    num_verified = record.num_accepted + (len(record.tokens) > record.num_accepted)
    is_lookup = True
    for i, token in enumerate(record.draft.items[:num_verified]):
        correct = i < record.num_accepted
        state.verified[token.source] += 1
        state.accepted[token.source] += correct
        is_lookup = is_lookup and looked_up[i : i + 1] == [token.token]
        if token.evidence and not is_lookup and token.source != own:
            estimator = state.estimator(token.source, constrained=bool(draft and draft.is_constrained))
            estimator.learn(token.evidence, text.bias(token.source), correct)


def _learn_lookup(state: PolicyState, text: RequestState, draft: SequenceDraft, record: StepRecord) -> None:
    """What lookups offered costs nothing to compare with what came, drafted or not."""
    for i, (token, came) in enumerate(zip(draft.candidate, record.tokens, strict=False)):
        correct, bias = token.token == came, text.bias(token.source)
        state.estimator(token.source, constrained=draft.is_constrained).learn(token.evidence, bias, correct)
        if i == 0:
            bias.note_first(correct)
        if not correct:
            break


def _learn_model(state: PolicyState, text: RequestState, draft: SequenceDraft, record: StepRecord) -> None:
    """What the draft model said, drafted or not, as far as it can be compared with what came."""
    for _, offer in draft.offers:
        state.mean_confidence += MEAN_CONFIDENCE_RATE * (offer.acceptance - state.mean_confidence)
    drafted = tuple(token.token for token in draft.tokens)
    for place, offer in draft.offers:
        is_sampled = offer.drawn_from is not None
        was_left_out = is_sampled and place == len(drafted)
        if place >= len(record.tokens) or drafted[:place] != record.tokens[:place] or was_left_out:
            break
        correct = place < record.num_accepted if is_sampled else offer.token == record.tokens[place]
        estimator = state.estimator(offer.source, constrained=draft.is_constrained)
        estimator.learn(offer.evidence, text.bias(offer.source), correct)
        text.confidence = average_after(text.confidence, offer.acceptance)
