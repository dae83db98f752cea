"""What a policy learns from the records of a step and what it had proposed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.data import DraftToken, StepRecord
from outrider.core.sequences import common_prefix
from outrider.policy.choice import ModelDraft
from outrider.policy.estimates import MEAN_CONFIDENCE_RATE, Calibration
from outrider.policy.state import PolicyState, RequestState

_MIN_OBSERVED = 16
_PLAIN_INTERVAL = 8
"""Of calls without drafts, the most frequent ones, only so many are learned from once enough were seen:
learning takes a noticeable part of a small model's step."""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in λ: about the last 30 count"""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one request's step was offered, for learning to compare with what became of it."""

    lookup: Sequence[DraftToken] = ()
    """what the model-free drafters offered"""
    is_constrained: bool = False
    model: ModelDraft | None = None


def learn_costs(state: PolicyState, records: Sequence[StepRecord]) -> None:
    """What the calls of a step took. Calls over prompts and drafts together tell nothing clear."""
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
    elif not decoding:
        state.costs.observe_prefill(first.batch_tokens, first.verify_s + first.read_s)
    draft = state.draft_costs
    expected_s = [draft.call_s(n, context=context) for n in work.call_tokens]
    for n, seconds in zip(work.call_tokens, expected_s, strict=True):
        draft.observe(n, seconds * work.model_s / sum(expected_s), context=context)
    if not work.calls and first.step % _PLAIN_INTERVAL == 0:
        draft.relax(state.costs.drift)
    if work.prefill_calls:
        draft.observe_prefill(work.prefill_tokens, work.prefill_s)
    if decoding:
        state.learn_own_time(decoding)


def plain_step_s(state: PolicyState, records: Sequence[StepRecord]) -> float | None:
    """What the step would have taken without drafts; None where prompts were read in it too."""
    if any(record.kind != "decode" or record.read_tokens for record in records):
        return None
    context, size = sum(record.position for record in records), len(records)
    return state.costs.call_s(size, context=context, num_sequences=size) + state.own_step_s


def learn_request(
    state: PolicyState, text: RequestState, proposal: Proposal, record: StepRecord, plain_s: float | None
) -> None:
    """What became of `proposal` in a decoding step of this request; `plain_s` is `plain_step_s`."""
    num_emitted = len(record.tokens)
    text.generated += num_emitted
    if plain_s is not None:  # what reading a prompt took says nothing about tokens
        _learn_times(text, record, plain_s, proposal.model)
    _learn_drafted(state, text, proposal, record)
    _learn_lookup(state, text, proposal, record)
    num_compared = 0 if proposal.model is None else _learn_model(state, text, proposal.model, record)
    text.confidence.skip(num_emitted - num_compared)
    _learn_uncached(text, proposal.model, record)


def _learn_times(text: RequestState, record: StepRecord, plain_s: float, draft: ModelDraft | None) -> None:
    num_emitted, step_s = len(record.tokens), record.total_s - record.work.prefill_s
    memory, share = _TOKEN_MEMORY**num_emitted, 1 / record.num_sequences
    text.spent_s = text.spent_s * memory + step_s * share
    text.emitted = text.emitted * memory + num_emitted
    text.decoded_s += step_s * share
    text.explored_s += record.work.prefill_s * share
    if draft is not None and draft.plan.is_exploring:
        text.explored_s += max(step_s - plain_s * num_emitted, 0.0) * share
    elif draft is not None:
        text.model_gain_steps += num_emitted - step_s / plain_s


def _learn_drafted(state: PolicyState, text: RequestState, proposal: Proposal, record: StepRecord) -> None:
    """The tokens that the target verified: the accepted ones, and the one that it replaced. Those of the
    draft model and those that lookups offered are learned below, drafted or not."""
    looked_up = [token.token for token in proposal.lookup]
    num_verified = record.num_accepted + (len(record.tokens) > record.num_accepted)
    own = proposal.model.offers[0][1].source if proposal.model and proposal.model.offers else None
    is_lookup = True
    for i, token in enumerate(record.draft.items[:num_verified]):
        correct = i < record.num_accepted
        state.calibration.setdefault(token.source, Calibration()).note(token.acceptance, correct)
        is_lookup = is_lookup and looked_up[i : i + 1] == [token.token]
        if token.evidence and not is_lookup and token.source != own:
            estimator = state.estimator(token.source, constrained=proposal.is_constrained)
            estimator.learn(token.evidence, text.bias(token.source), correct)


def _learn_lookup(state: PolicyState, text: RequestState, proposal: Proposal, record: StepRecord) -> None:
    """What lookups offered costs nothing to compare with what came, drafted or not."""
    for i, (token, came) in enumerate(zip(proposal.lookup, record.tokens, strict=False)):
        correct, bias = token.token == came, text.bias(token.source)
        estimator = state.estimator(token.source, constrained=proposal.is_constrained)
        estimator.learn(token.evidence, bias, correct)
        if i == 0:
            bias.note_first(correct)
        if not correct:
            break


def _learn_model(state: PolicyState, text: RequestState, draft: ModelDraft, record: StepRecord) -> int:
    """What the draft model said, drafted or not; returns for how many tokens it could be compared."""
    for _, offer in draft.offers:
        state.mean_confidence += MEAN_CONFIDENCE_RATE * (offer.acceptance - state.mean_confidence)
    drafted, num_compared = tuple(token.token for token in draft.tokens), 0
    for place, offer in draft.offers:
        is_sampled = offer.drawn_from is not None
        was_left_out = is_sampled and place == len(drafted)
        if place >= len(record.tokens) or drafted[:place] != record.tokens[:place] or was_left_out:
            break
        correct = place < record.num_accepted if is_sampled else offer.token == record.tokens[place]
        estimator = state.estimator(offer.source, constrained=draft.asking.is_constrained)
        estimator.learn(offer.evidence, text.bias(offer.source), correct)
        text.confidence.learn(offer.acceptance)
        num_compared += 1
    return num_compared


def _learn_uncached(text: RequestState, draft: ModelDraft | None, record: StepRecord) -> None:
    """How many tokens a draft model has yet to evaluate."""
    if text.uncached is not None:
        text.uncached += len(record.tokens)
    if draft is not None and record.work.calls:
        num_read = common_prefix(draft.read, record.tokens)
        is_block = draft.plan.costs.block > 1  # which has not read the token that its block began with
        text.uncached = max(len(record.tokens) + is_block - num_read, 1)
