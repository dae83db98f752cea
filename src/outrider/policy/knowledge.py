"""What a policy has learned: prices, how far each drafter can be trusted, and about each text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.core.data import Draft, StepRecord
from outrider.costs import CallCosts
from outrider.policy.acceptance import Calibration, Estimator, TextState
from outrider.policy.growth import Chain, Prices
from outrider.policy.outlook import Outlook, Values

__all__ = ["LONGEST_LEAD", "LONGEST_MODEL_DRAFT", "SCHEMA", "Knowledge", "Text"]

SCHEMA = "outrider.acceptance/1"

LONGEST_MODEL_DRAFT = 16
"""tokens; behind more than these little survives"""
LONGEST_LEAD = 8
"""free tokens that a draft model may be asked to go on behind"""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in what a token takes: about the last 30 count"""
_TOKEN_PRIOR = 30.0
"""how many tokens the estimate at the start counts for"""
_PRIOR_SHARE = 0.85
"""what a token is thought to take at the start, in plain steps"""
_OWN_RATE = 0.1
"""weight of a step in the mean of what the engine itself takes"""
_ROUGH_RATIO = 0.06
"""Prices this close share what was worked out for them."""
_RETURNS_WEIGHT = 30.0
"""steps that what is usual counts for in a text's returns"""
_RETURNS_MEMORY = 0.99
"""weight of the older tokens in a text's returns"""
_RETURNS_RATE = 0.02
"""weight of a step in the usual returns"""
_MOST_VALUES = 64
"""how many are kept; then all are worked out anew, from what was learned meanwhile"""


@dataclass(slots=True)
class Asked:
    """What a draft model was asked in a step, and what it said."""

    model: str
    lead: int
    """free tokens in front of its own"""
    expected_s: float
    """what the step was expected to gain"""
    prices: Prices
    promised: bool
    """whether there was a free offer"""
    offer: Draft = field(default_factory=Draft)
    chances: list[float] = field(default_factory=list)
    """of every token it found, whether or not it was taken"""
    phases: list[float] = field(default_factory=list)
    """before each of these"""


@dataclass(slots=True)
class Returns:
    """By how much steps with a draft model gain more than expected, in tokens: a mean that is drawn to
    `usual`, and to which older steps count less."""

    usual: float = 0.0
    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """Tokens a step."""
        return (self.total + _RETURNS_WEIGHT * self.usual) / (self.weight + _RETURNS_WEIGHT)

    def note(self, tokens: float) -> None:
        """A step gained so many tokens more than expected."""
        self.total += tokens
        self.weight += 1

    def fade(self, num_tokens: int) -> None:
        """The text went on by so many tokens."""
        memory = _RETURNS_MEMORY**num_tokens
        self.total *= memory
        self.weight *= memory


@dataclass(slots=True)
class Text:
    """What is remembered of a running request."""

    prompt_tokens: int
    max_tokens: int | None
    phase: float
    generated: int = 0
    states: dict[str, TextState] = field(default_factory=dict)
    readers: set[str] = field(default_factory=set)
    """draft models that have read the prompt"""
    unread: dict[str, int] = field(default_factory=dict)
    """tokens that a draft model has yet to read before it can draft, by its name"""
    spent_s: float = 0.0
    earned: float = 0.0
    """tokens that were emitted for it"""
    decoded_s: float = 0.0
    behind_s: float = 0.0
    """of it, what plain decoding would not have taken; negative where it would have taken more"""
    explored_s: float = 0.0
    """of it, spent on finding out what a draft model is worth"""
    offered: Chain = field(default_factory=Chain)
    """what the free drafters offered in the present step"""
    asked: Asked | None = None
    """what a draft model was asked in the present step"""
    returns: dict[bool, Returns] = field(default_factory=dict)
    """of asking a draft model with and without a free offer"""

    def state(self, name: str) -> TextState:
        """What a drafter's offers to this text have been worth."""
        return self.states.setdefault(name, TextState())


class Knowledge:
    """Costs, estimates and what the engine itself takes; all of it learns from step records."""

    def __init__(self, costs: CallCosts, draft_costs: Mapping[str, CallCosts]) -> None:
        self.costs = costs
        self.draft_costs = dict(draft_costs)
        self.calibration: dict[str, Calibration] = {}
        self.outlook = Outlook()
        self.own_step_s = 0.0
        """the engine's own time in a step, and for each drafted token"""
        self.own_token_s = 0.0
        self.usual_returns = {False: 0.0, True: 0.0}
        self._estimators: dict[str, Estimator] = {}
        self._values: dict[tuple[int, ...], Values] = {}

    # Asking

    def new_text(self, prompt_tokens: int, max_tokens: int | None) -> Text:
        """A request whose text is not known yet."""
        returns = {promised: Returns(usual) for promised, usual in self.usual_returns.items()}
        return Text(prompt_tokens, max_tokens, self.outlook.usual, returns=returns)

    def estimator(self, name: str) -> Estimator:
        """The acceptance of a drafter's tokens."""
        return self._estimators.setdefault(name, Estimator(name))

    def draft_cost(self, name: str) -> CallCosts:
        """What calls of a draft model take."""
        return self.draft_costs.setdefault(name, CallCosts())

    def prices(self, text: Text, model: str | None, longest: int, others: int, num_sequences: int) -> Prices:
        """What a step of this text costs and earns; `others` are tokens of other sequences in the call."""
        context = text.prompt_tokens + text.generated
        calls_s = self.costs.calls_s(
            longest + 1, context=context, others=others, num_sequences=num_sequences
        ) + self.own_token_s * np.arange(longest + 1)
        plain_s = (float(calls_s[0]) + self.own_step_s) / num_sequences
        prior_s = _PRIOR_SHARE * plain_s * _TOKEN_PRIOR
        token_s = (text.spent_s + prior_s) / (text.earned + _TOKEN_PRIOR)
        if model is None:
            return Prices(token_s, calls_s)
        draft, unread = self.draft_cost(model), text.unread.get(model, 1)
        first_s = draft.calls_s(unread + LONGEST_LEAD, context=context)[unread - 1 :]
        one_s, two_s = draft.calls_s(2, context=context)
        return Prices(token_s, calls_s, float(one_s), first_s, float(two_s - one_s))

    def can_pay(self, model: str, context: int) -> bool:
        """Whether the draft model would be of use if it were always right."""
        draft = self.draft_cost(model)
        calls_s = self.costs.calls_s(LONGEST_MODEL_DRAFT + 1, context=context)
        drafted = np.arange(1, LONGEST_MODEL_DRAFT + 1)
        steps_s = calls_s[1:] + draft.call_s(1, context=context) * drafted
        return bool((steps_s < calls_s[0] * (1 + drafted)).any())

    def values(self, prices: Prices) -> Values:
        """What drafting on is worth at these prices, or at others within a few per cent."""
        calls_s = prices.calls_s[: LONGEST_MODEL_DRAFT + 1]
        marks = (calls_s[0], calls_s[len(calls_s) // 4], prices.step_s, prices.token_s, prices.bonus_s)
        key = (len(calls_s), *(round(math.log(max(mark, 1e-9)) / _ROUGH_RATIO) for mark in marks))
        if key not in self._values:
            if len(self._values) >= _MOST_VALUES:
                self._values.clear()
            shares = self.outlook.shares
            self._values[key] = Values(shares, calls_s, prices.step_s, prices.token_s, prices.bonus_s)
        return self._values[key]

    # Learning

    def learn_costs(self, records: Sequence[StepRecord]) -> None:
        """What the calls of a step took. Calls over prompts and drafts together tell nothing clear."""
        first, work = records[0], records[0].work
        decoding = [record for record in records if record.kind == "decode"]
        context = sum(record.position for record in records)
        if len(decoding) == len(records):
            self.costs.observe(
                first.batch_tokens, first.verify_s, context=context, num_sequences=len(records)
            )
        elif not decoding:
            self.costs.observe_prefill(first.batch_tokens, first.verify_s)
        if len(self.draft_costs) == 1:  # of several it is not known whose calls they were
            [draft] = self.draft_costs.values()
            expected_s = [draft.call_s(n, context=context) for n in work.call_tokens]
            for n, seconds in zip(work.call_tokens, expected_s, strict=True):
                draft.observe(n, seconds * work.model_s / sum(expected_s), context=context)
            if work.prefill_calls:
                draft.observe_prefill(context, work.prefill_s)
        if decoding:
            self._learn_own(decoding)

    def _learn_own(self, decoding: Sequence[StepRecord]) -> None:
        first = decoding[0]
        own_s = first.draft_s - first.work.model_s + first.other_s + sum(r.sampling_s for r in decoding)
        drafted = sum(len(record.draft) for record in decoding)
        self.own_step_s += _OWN_RATE * (own_s - self.own_token_s * drafted - self.own_step_s)
        if drafted:
            self.own_token_s += _OWN_RATE * ((own_s - self.own_step_s) / drafted - self.own_token_s)
        self.own_step_s, self.own_token_s = max(self.own_step_s, 0.0), max(self.own_token_s, 0.0)

    def learn_text(self, text: Text, record: StepRecord) -> None:
        """What became of a step of this text."""
        emitted = len(record.tokens)
        text.generated += emitted
        memory = _TOKEN_MEMORY**emitted
        spent_s = (record.total_s - record.work.prefill_s) / record.num_sequences
        text.spent_s = text.spent_s * memory + spent_s
        text.earned = text.earned * memory + emitted
        text.decoded_s += spent_s
        plain_s = self.costs.call_s(1, context=record.position, num_sequences=1) + self.own_step_s
        text.behind_s += spent_s - emitted * plain_s / record.num_sequences
        self._learn_free(text, record)
        self._learn_offered(text, record)
        seen = self._learn_asked(text, record) if text.asked else 0
        text.phase = self.outlook.fade(text.phase, emitted - seen)
        for returns in text.returns.values():
            returns.fade(emitted)
        self._learn_unread(text, record)
        text.offered, text.asked = Chain(), None

    def _learn_free(self, text: Text, record: StepRecord) -> None:
        """The tokens that the target judged: the accepted ones, and the one that it replaced."""
        draft, offered = record.draft, text.offered.tokens
        judged = record.num_accepted + (len(record.tokens) > record.num_accepted)
        as_offered = True
        for i in range(min(len(draft), judged)):
            name, right = draft.sources[i], i < record.num_accepted
            self.calibration.setdefault(name, Calibration()).note(draft.acceptance[i], right)
            as_offered = as_offered and offered[i : i + 1] == [draft.tokens[i]]
            if draft.hints and not as_offered and name not in self.draft_costs:
                self.estimator(name).learn(draft.hints[i], text.state(name), right)

    def _learn_asked(self, text: Text, record: StepRecord) -> int:
        """What the draft model said, drafted or not; returns for how many tokens it could be compared."""
        asked = text.asked
        assert asked is not None
        for phase, chance in zip(asked.phases, asked.chances, strict=True):
            self.outlook.learn(phase, chance)
        seen, offer = 0, asked.offer
        standing = record.draft.tokens[: asked.lead] == record.tokens[: asked.lead]
        for i, hint in enumerate(offer.hints):
            at = asked.lead + i
            if not standing or at >= len(record.tokens):
                break
            standing = at < record.num_accepted if offer.probs else offer.tokens[i] == record.tokens[at]
            self.estimator(asked.model).learn(hint, text.state(asked.model), standing)
            text.phase = self.outlook.advance(text.phase, asked.chances[i])
            seen += 1
        self._learn_returns(text, asked, record)
        return seen

    def _learn_returns(self, text: Text, asked: Asked, record: StepRecord) -> None:
        prices = asked.prices
        cost_s = prices.calls_s[len(record.draft)] + prices.first_s[asked.lead]
        cost_s += prices.step_s * (max(len(asked.chances), 1) - 1)
        gained = (len(record.tokens) * prices.token_s - cost_s - asked.expected_s) / prices.token_s
        text.returns[asked.promised].note(float(gained))
        usual = self.usual_returns[asked.promised]
        self.usual_returns[asked.promised] = usual + _RETURNS_RATE * (float(gained) - usual)

    def _learn_offered(self, text: Text, record: StepRecord) -> None:
        """What the free drafters offered costs nothing to compare with what came."""
        offered = text.offered
        for i in range(min(len(offered), len(record.tokens))):
            right = offered.tokens[i] == record.tokens[i]
            state = text.state(offered.sources[i])
            self.estimator(offered.sources[i]).learn(offered.hints[i], state, right)
            if i == 0:
                state.note_first(right)
            if not right:
                break

    def _learn_unread(self, text: Text, record: StepRecord) -> None:
        """A draft model has evaluated its own tokens but the last, and those before them."""
        for name in self.draft_costs:
            unread = text.unread.get(name, 1) + len(record.tokens)
            if text.asked and text.asked.model == name and record.work.calls:
                text.readers.add(name)
                sources = record.draft.sources
                last = max((i for i, source in enumerate(sources) if source == name), default=0)
                unread = 1 + max(0, record.num_accepted - last)
            text.unread[name] = unread

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """What was learned about acceptance, for the next session."""
        return {
            "schema": SCHEMA,
            "estimators": {name: known.as_json() for name, known in self._estimators.items()},
            "outlook": self.outlook.as_json(),
        }

    def recall(self, data: Mapping[str, Any]) -> None:
        """Take over what an earlier session learned. Raises KeyError, TypeError or ValueError."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        estimators = {name: Estimator.from_json(name, known) for name, known in data["estimators"].items()}
        outlook = Outlook.from_json(data["outlook"])
        self._estimators, self.outlook = estimators, outlook
