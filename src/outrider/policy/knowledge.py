"""What a policy has learned: prices, how far each drafter can be trusted, and about each text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outrider.core.data import StepRecord
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.policy.acceptance import Calibration, Estimator
from outrider.policy.growth import Array, Prices, Rises
from outrider.policy.outlook import Outlook, Values
from outrider.policy.probing import Probing
from outrider.policy.text import Text

__all__ = ["LONGEST_FORCED_DRAFT", "LONGEST_LEAD", "LONGEST_MODEL_DRAFT", "SCHEMA", "Batch", "Knowledge"]

SCHEMA = "outrider.acceptance/1"

LONGEST_MODEL_DRAFT = 16
"""tokens; behind more than these little survives"""
LONGEST_FORCED_DRAFT = 40
"""tokens, where a constraint forces a part of them"""
LONGEST_LEAD = 8
"""free tokens that a draft model may be asked to go on behind"""
_TOKEN_PRIOR = 30.0
"""how many tokens the estimate at the start counts for"""
_PRIOR_SHARE = 0.85
"""what a token is thought to take at the start, in plain steps"""
_OWN_RATE = 0.1
"""weight of a step in the mean of what the engine itself takes"""
_ROUGH_RATIO = 0.06
"""Prices this close share what was worked out for them."""
_MAX_SAVED, _MAX_LOST = 80.0, 20.0
"""plain steps that count of what was saved or lost"""
_MAX_VALUES = 64
_MAX_AGE = 16
"""how many values are kept, and for how many tokens that are learned from; then all are worked out anew"""


@dataclass(frozen=True, slots=True)
class Batch:
    """What shares a step's calls."""

    num_sequences: int
    context: int
    """tokens of all sequences so far"""
    others: int
    """tokens of the target's call that are no draft of the sequence in question nor its last token"""
    token_s: float
    """what an emitted token is worth: the time that it takes lately, on the whole"""

    @classmethod
    def of(cls, texts: Sequence[Text], knowledge: Knowledge, others: int) -> Batch:
        """The company of these texts, with `others` more tokens in the call."""
        size, context = len(texts), sum(text.context for text in texts)
        plain_s = knowledge.costs.call_s(size, context=context, num_sequences=size) + knowledge.own_step_s
        prior_s = _PRIOR_SHARE * plain_s * _TOKEN_PRIOR
        spent_s, earned = sum(text.spent_s for text in texts), sum(text.earned for text in texts)
        token_s = (spent_s + prior_s) / (earned + _TOKEN_PRIOR * size)
        return cls(size, context, size - 1 + others, token_s)


class Knowledge:
    """Costs, estimates and what the engine itself takes; all of it learns from step records."""

    def __init__(self, costs: CallCosts, draft_costs: Mapping[str, CallCosts]) -> None:
        self.costs = costs
        self.draft_costs = dict(draft_costs)
        self.calibration: dict[str, Calibration] = {}
        self.outlook = Outlook()
        self.own_step_s = 0.0
        """the engine's own time in a step, for each drafted token, and beside each call of a draft model"""
        self.own_token_s = 0.0
        self.own_call_s = 0.0
        self.probing = Probing()
        self.saved_steps = 0.0
        """plain steps that all texts together were ahead of plain decoding, within bounds"""
        self.num_in_vain = 0
        """how often draft models were weighed and not asked; each time that one is asked halves it"""
        self._estimators: dict[str, Estimator] = {}
        self._values: dict[tuple[int, ...], Values] = {}
        self._values_at = 0
        self._rises: Rises | None = None

    # CheckRequest

    def new_text(self, prompt_tokens: int, max_tokens: int | None) -> Text:
        """A request whose text is not known yet."""
        return Text(prompt_tokens, max_tokens, self.outlook.usual)

    def estimator(self, name: str, *, constrained: bool = False) -> Estimator:
        """The acceptance of a drafter's tokens. What matches free text seldom goes on alike in the values
        of a schema, so constrained text has estimates of its own."""
        key = f"{name} (constrained)" if constrained else name
        if key not in self._estimators:
            self._estimators[key] = Estimator(key)
        return self._estimators[key]

    def draft_cost(self, name: str) -> CallCosts:
        """What calls of a draft model take."""
        if name not in self.draft_costs:
            self.draft_costs[name] = CallCosts()
        return self.draft_costs[name]

    def calls_s(self, most: int, batch: Batch) -> Array:
        """Seconds of the target's call with 0 to `most` drafted tokens, the engine's own time for them
        included, shape (most + 1,)."""
        calls_s: Array = self.costs.calls_s(
            most + 1, context=batch.context, others=batch.others, num_sequences=batch.num_sequences
        ) + self.own_token_s * np.arange(most + 1)
        return calls_s

    def rises(self, context: int) -> Rises:
        """By how much calls behind so many tokens rise with what is drafted."""
        calls_s = self.costs.calls_s(MAX_TOKENS, context=context)
        if self._rises is None or self._rises.calls_s.base is not calls_s.base:
            self._rises = Rises(calls_s)
        return self._rises

    def prices(
        self, text: Text, model: str | None, longest: int, batch: Batch, lead: int = LONGEST_LEAD
    ) -> Prices:
        """What a step of this text costs and earns, with up to `lead` free tokens in front of a model's."""
        context, size, token_s = batch.context, batch.num_sequences, batch.token_s
        calls_s = self.calls_s(longest, batch)
        if model is None:
            return Prices(token_s, calls_s)
        draft = self.draft_cost(model)
        unread = draft.read_tokens(text.unread.get(model, 1))
        draft_s = draft.calls_s(unread + lead, context=context, others=size - 1) + self.own_call_s
        if size > 1:  # the others draft as well, and bear their part
            draft_s = draft_s - draft.call_s(size - 1, context=context) * (size - 1) / size
        step_s, next_s = float(draft_s[0]), float(draft_s[1])
        return Prices(token_s, calls_s, step_s, draft_s[unread - 1 :], next_s - step_s)

    def can_pay(self, model: str, context: int) -> bool:
        """Whether the draft model would be of use if it were always right."""
        step_s = self.draft_cost(model).call_s(1, context=context) + self.own_call_s
        rises = self.rises(context)
        step = step_s / float(rises.calls_s[0])
        return any(rise + step * n < n for n, rise in enumerate(rises.rises[:LONGEST_MODEL_DRAFT], 1))

    def values(self, prices: Prices, longest: int) -> Values:
        """What drafting on is worth, up to `longest` tokens, in plain calls: at these prices, or at others
        that are within a few per cent of them beside a plain call."""
        calls = prices.calls_s[: longest + 1] / prices.calls_s[0]
        step, token, bonus = (
            seconds / float(prices.calls_s[0]) for seconds in (prices.step_s, prices.token_s, prices.bonus_s)
        )
        if len(self._values) >= _MAX_VALUES or self.outlook.num_learned >= self._values_at + _MAX_AGE:
            self._values.clear()
            self._values_at = self.outlook.num_learned
        marks = (float(calls[len(calls) // 4]), float(calls[-1]), step, token, bonus)
        key = (len(calls), *(round(math.log(max(mark, 1e-4)) / _ROUGH_RATIO) for mark in marks))
        if key not in self._values:
            self._values[key] = Values(self.outlook.shares, calls, step, token, bonus)
        return self._values[key]

    # Learning

    def note_own(self, decoding: Sequence[StepRecord]) -> None:
        """What the engine itself took in a step of these sequences."""
        first, work = decoding[0], decoding[0].work
        own_s = first.draft_s - work.model_s + first.other_s
        own_s += sum(record.sampling_s for record in decoding)
        drafted = sum(len(record.draft) for record in decoding)
        beyond_s = own_s - self.own_step_s
        if work.calls:  # else what goes along with asking would seem to be part of every step
            per_call_s = (beyond_s - self.own_token_s * drafted) / work.calls
            self.own_call_s = max(self.own_call_s + _OWN_RATE * (per_call_s - self.own_call_s), 0.0)
            return
        self.own_step_s += _OWN_RATE * (beyond_s - self.own_token_s * drafted)
        if drafted:
            self.own_token_s += _OWN_RATE * ((own_s - self.own_step_s) / drafted - self.own_token_s)
        self.own_step_s, self.own_token_s = max(self.own_step_s, 0.0), max(self.own_token_s, 0.0)

    def note_saved(self, steps: float) -> None:
        """A step took so many plain steps less than plain decoding."""
        self.saved_steps = min(max(self.saved_steps + steps, -_MAX_LOST), _MAX_SAVED)

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """What was learned about acceptance, for the next session."""
        return {
            "schema": SCHEMA,
            "estimators": {name: known.as_json() for name, known in self._estimators.items()},
            "outlook": self.outlook.as_json(),
            "probing": asdict(self.probing),
            "saved_steps": self.saved_steps,
        }

    def recall(self, data: Any) -> None:
        """Take over what an earlier session learned. Raises ValueError for anything but what `as_json`
        gave; then nothing is taken over."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            known = {name: Estimator.from_json(name, entry) for name, entry in data["estimators"].items()}
            outlook = Outlook.from_json(data["outlook"])
            probing = Probing.from_json(data["probing"])
            if not math.isfinite(saved := float(data["saved_steps"])):
                raise ValueError("what it saved is damaged")
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
        self._estimators, self.outlook, self.probing = known, outlook, probing
        self.saved_steps = 0.0
        self.note_saved(saved)
        self._values.clear()
        self._values_at = 0
