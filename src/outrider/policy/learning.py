"""What a policy learns from the records of a step."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.data import StepRecord
from outrider.policy.acceptance import Calibration
from outrider.policy.growth import Chain
from outrider.policy.knowledge import Knowledge
from outrider.policy.text import Asked, Text

__all__ = ["learn_costs", "learn_text", "plain_step_s"]

_EVERY_UNTIL = 16
_PLAIN_EVERY = 8
"""Of plain calls, the most frequent ones, only so many are learned from once a good number was seen: learning
takes a noticeable part of a small model's step."""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in what a token takes: about the last 30 count"""


def learn_costs(knowledge: Knowledge, records: Sequence[StepRecord]) -> None:
    """What the calls of a step took. Calls over prompts and drafts together tell nothing clear."""
    first, work = records[0], records[0].work
    decoding = [record for record in records if record.kind == "decode"]
    context = sum(record.position for record in records)
    drafted = first.batch_tokens > len(records)
    if len(decoding) == len(records):
        if drafted or knowledge.costs.num_observed < _EVERY_UNTIL or first.step % _PLAIN_EVERY == 0:
            knowledge.costs.observe(
                first.batch_tokens, first.verify_s, context=context, num_sequences=len(records)
            )
    elif not decoding:
        knowledge.costs.observe_prefill(first.batch_tokens, first.verify_s)
    if len(knowledge.draft_costs) == 1:  # of several it is not known whose calls they were
        [draft] = knowledge.draft_costs.values()
        expected_s = [draft.call_s(n, context=context) for n in work.call_tokens]
        for n, seconds in zip(work.call_tokens, expected_s, strict=True):
            draft.observe(n, seconds * work.model_s / sum(expected_s), context=context)
        if work.prefill_calls:
            draft.observe_prefill(work.prefill_tokens, work.prefill_s)
    if decoding:
        knowledge.note_own(decoding)


def plain_step_s(knowledge: Knowledge, records: Sequence[StepRecord]) -> float | None:
    """What the step would have taken without drafts; None where prompts were read in it too."""
    if any(record.kind != "decode" for record in records):
        return None
    context, size = sum(record.position for record in records), len(records)
    return knowledge.costs.call_s(size, context=context, num_sequences=size) + knowledge.own_step_s


def learn_text(knowledge: Knowledge, text: Text, record: StepRecord, plain_s: float | None) -> None:
    """What became of a step of this text; `plain_s` is `plain_step_s`."""
    emitted = len(record.tokens)
    text.generated += emitted
    _learn_times(knowledge, text, record, plain_s)
    _learn_drafted(knowledge, text, record)
    _learn_offered(knowledge, text, record)
    seen = _learn_asked(knowledge, text, text.asked, record) if text.asked else 0
    text.phase = knowledge.outlook.fade(text.phase, emitted - seen)
    _learn_unread(knowledge, text, record)
    text.offered, text.asked = Chain(), None


def _learn_times(knowledge: Knowledge, text: Text, record: StepRecord, plain_s: float | None) -> None:
    emitted, step_s = len(record.tokens), record.total_s - record.work.prefill_s
    if plain_s is None:  # what reading a prompt took says nothing about tokens
        return
    memory = _TOKEN_MEMORY**emitted
    text.spent_s = text.spent_s * memory + step_s / record.num_sequences
    text.earned = text.earned * memory + emitted
    text.decoded_s += step_s / record.num_sequences
    behind = step_s / plain_s - emitted
    text.behind += behind
    knowledge.note_saved(-behind)
    text.explored_s += record.work.prefill_s / record.num_sequences
    if text.asked and text.asked.exploring:
        text.explored_s += max(behind * plain_s, 0.0) / record.num_sequences


def _learn_drafted(knowledge: Knowledge, text: Text, record: StepRecord) -> None:
    """The tokens that the target judged: the accepted ones, and the one that it replaced."""
    draft, offered = record.draft, text.offered.tokens
    judged = record.num_accepted + (len(record.tokens) > record.num_accepted)
    as_offered = True
    for i in range(min(len(draft), judged)):
        name, right = draft.sources[i], i < record.num_accepted
        knowledge.calibration.setdefault(name, Calibration()).note(draft.acceptance[i], right)
        as_offered = as_offered and offered[i : i + 1] == [draft.tokens[i]]
        if draft.estimates and not as_offered and name not in knowledge.draft_costs:
            estimator = knowledge.estimator(name, constrained=text.is_constrained)
            estimator.learn(draft.estimates[i], text.state(name), right)


def _learn_offered(knowledge: Knowledge, text: Text, record: StepRecord) -> None:
    """What the free drafters offered costs nothing to compare with what came, drafted or not."""
    offered = text.offered
    for i in range(min(len(offered), len(record.tokens))):
        right = offered.tokens[i] == record.tokens[i]
        state = text.state(offered.sources[i])
        estimator = knowledge.estimator(offered.sources[i], constrained=text.is_constrained)
        estimator.learn(offered.estimates[i], state, right)
        if i == 0:
            state.note_first(right)
        if not right:
            break


def _learn_asked(knowledge: Knowledge, text: Text, asked: Asked, record: StepRecord) -> int:
    """What the draft model said, drafted or not; returns for how many tokens it could be compared."""
    for phase, chance in zip(asked.phases, asked.chances, strict=True):
        knowledge.outlook.learn(phase, chance)
    seen, offer = 0, asked.offer
    if not asked.lead and offer.tokens and record.tokens and text.offered.tokens:
        right = bool(record.num_accepted) if offer.probs else offer.tokens[0] == record.tokens[0]
        agrees = offer.tokens[0] == text.offered.tokens[0]
        knowledge.probing.note(text.offered.chances[0], agrees, right)
    standing = record.tokens[: len(asked.lead)] == asked.lead
    for i, (estimate, source) in enumerate(zip(offer.estimates, offer.sources, strict=True)):
        at = len(asked.lead) + i
        if not standing or at >= len(record.tokens):
            break
        standing = at < record.num_accepted if offer.probs else offer.tokens[i] == record.tokens[at]
        if source == asked.model:  # not what a constraint forced in between
            estimator = knowledge.estimator(asked.model, constrained=text.is_constrained)
            estimator.learn(estimate, text.state(asked.model), standing)
            text.phase = knowledge.outlook.advance(text.phase, asked.chances[seen])
            seen += 1
    return seen


def _learn_unread(knowledge: Knowledge, text: Text, record: StepRecord) -> None:
    """A draft model has evaluated its own tokens but the last, and those before them."""
    for name in knowledge.draft_costs:
        unread = text.unread.get(name, 1) + len(record.tokens)
        if text.asked and text.asked.model == name and record.work.calls:
            text.readers.add(name)
            sources = record.draft.sources
            last = max((i for i, source in enumerate(sources) if source == name), default=0)
            unread = 1 + max(0, record.num_accepted - last)
        text.unread[name] = unread
