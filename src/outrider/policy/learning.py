"""What a policy learns from the records of a step and what it had proposed for it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.data import StepRecord
from outrider.policy.estimates import Calibration
from outrider.policy.proposal import DraftQuery, Proposal
from outrider.policy.state import PolicyState, RequestState

_MIN_OBSERVED = 16
_PLAIN_INTERVAL = 8
"""Of calls without drafts, the most frequent ones, only so many are learned from once enough were seen:
learning takes a noticeable part of a small model's step."""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in λ: about the last 30 count"""


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
    if len(state.draft_costs) == 1:  # of several it is not known whose calls they were
        [draft] = state.draft_costs.values()
        expected_s = [draft.call_s(n, context=context) for n in work.call_tokens]
        for n, seconds in zip(work.call_tokens, expected_s, strict=True):
            draft.observe(n, seconds * work.model_s / sum(expected_s), context=context)
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
    query, num_emitted = proposal.query, len(record.tokens)
    text.generated += num_emitted
    if plain_s is not None:  # what reading a prompt took says nothing about tokens
        _learn_times(state, text, record, plain_s, bool(query and query.is_exploring))
    _learn_drafted(state, text, proposal, record)
    _learn_lookup(state, text, proposal, record)
    num_compared = _learn_query(state, text, proposal, query, record) if query else 0
    text.average_confidence = state.confidence.decay(text.average_confidence, num_emitted - num_compared)
    _learn_uncached(text, query, record)


def _learn_times(
    state: PolicyState, text: RequestState, record: StepRecord, plain_s: float, is_exploring: bool
) -> None:
    num_emitted, step_s = len(record.tokens), record.total_s - record.work.prefill_s
    memory = _TOKEN_MEMORY**num_emitted
    text.spent_s = text.spent_s * memory + step_s / record.num_sequences
    text.emitted = text.emitted * memory + num_emitted
    text.decoded_s += step_s / record.num_sequences
    slowdown = step_s / plain_s - num_emitted
    text.slowdown_steps += slowdown
    state.add_saved(-slowdown)
    text.explored_s += record.work.prefill_s / record.num_sequences
    if is_exploring:
        text.explored_s += max(slowdown * plain_s, 0.0) / record.num_sequences


def _learn_drafted(state: PolicyState, text: RequestState, proposal: Proposal, record: StepRecord) -> None:
    """The tokens that the target verified: the accepted ones, and the one that it replaced. Those of draft
    models and those that lookups offered are learned below, drafted or not."""
    draft, looked_up = record.draft, proposal.lookup.tokens
    num_verified = record.num_accepted + (len(record.tokens) > record.num_accepted)
    is_lookup = True
    for i in range(min(len(draft), num_verified)):
        name, correct = draft.sources[i], i < record.num_accepted
        state.calibration.setdefault(name, Calibration()).note(draft.acceptance[i], correct)
        is_lookup = is_lookup and looked_up[i : i + 1] == (draft.tokens[i],)
        if draft.estimates and not is_lookup and name not in state.draft_costs:
            estimator = state.estimator(name, constrained=proposal.is_constrained)
            estimator.learn(draft.estimates[i], text.bias(name), correct)


def _learn_lookup(state: PolicyState, text: RequestState, proposal: Proposal, record: StepRecord) -> None:
    """What lookups offered costs nothing to compare with what came, drafted or not."""
    lookup = proposal.lookup
    for i in range(min(len(lookup), len(record.tokens))):
        correct = lookup.tokens[i] == record.tokens[i]
        bias = text.bias(lookup.sources[i])
        estimator = state.estimator(lookup.sources[i], constrained=proposal.is_constrained)
        estimator.learn(lookup.estimates[i], bias, correct)
        if i == 0:
            bias.note_first(correct)
        if not correct:
            break


def _learn_query(
    state: PolicyState, text: RequestState, proposal: Proposal, query: DraftQuery, record: StepRecord
) -> int:
    """What the draft model said, drafted or not; returns for how many tokens it could be compared."""
    for average, acceptance in zip(query.averages, query.acceptance, strict=True):
        state.confidence.learn(average, acceptance)
    offer, lookup = query.offer, proposal.lookup
    if not query.lookup_prefix and offer.tokens and record.tokens and lookup.tokens:
        correct = bool(record.num_accepted) if offer.probs else offer.tokens[0] == record.tokens[0]
        state.agreement.learn(lookup.acceptance[0], offer.tokens[0] == lookup.tokens[0], correct)
    num_compared, start = 0, len(query.lookup_prefix)
    correct = record.tokens[:start] == query.lookup_prefix
    estimator = state.estimator(query.model, constrained=proposal.is_constrained)
    for i, (estimate, source) in enumerate(zip(offer.estimates, offer.sources, strict=True), start):
        if not correct or i >= len(record.tokens):
            break
        correct = i < record.num_accepted if offer.probs else offer.tokens[i - start] == record.tokens[i]
        if source == query.model:  # not what a constraint forced in between
            estimator.learn(estimate, text.bias(query.model), correct)
            acceptance = query.acceptance[num_compared]
            text.average_confidence = state.confidence.update(text.average_confidence, acceptance)
            num_compared += 1
    return num_compared


def _learn_uncached(text: RequestState, query: DraftQuery | None, record: StepRecord) -> None:
    """A draft model has evaluated its own tokens but the last, and those before them."""
    for name in text.uncached:
        text.uncached[name] += len(record.tokens)
    if query and record.work.calls:
        sources = record.draft.sources
        last = max((i for i, source in enumerate(sources) if source == query.model), default=0)
        text.uncached[query.model] = 1 + max(0, record.num_accepted - last)
