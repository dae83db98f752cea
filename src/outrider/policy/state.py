"""What a policy knows: the costs of calls, how good each drafter is, and about each request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from outrider.core.contracts import DraftRequest
from outrider.core.data import StepRecord
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.policy.estimates import Calibration, DrafterAgreement, Estimator, RequestBias
from outrider.policy.objective import Array, MarginalCosts, StepCosts, reward_per_token
from outrider.policy.stopping import ConfidenceModel, ContinuationValue

SCHEMA = "outrider.acceptance/1"

MAX_MODEL_DRAFT = 16
"""tokens; the prefix acceptance probability of longer drafts is small"""
MAX_CONSTRAINED_MODEL_DRAFT = 40
"""tokens, where a constraint forces a part of them"""
MAX_LOOKUP_PREFIX = 8
"""lookup tokens after which a draft model may be asked to go on"""
_OWN_RATE = 0.1
"""weight of a step in the mean of the engine's own times"""
_LOG_COST_STEP = 0.06
"""Costs whose logarithms round to the same multiple of this share a table of continuation values."""
_MAX_SAVED = 80.0
"""plain steps that count of what was saved or lost: earlier texts must not decide for ever"""
_MAX_TABLE_AGE = 64
"""Tables of continuation values and tokens learned from after which tables are made again"""


@dataclass(slots=True)
class RequestState:
    """A request as far as it has come."""

    prompt_tokens: int
    max_tokens: int | None
    average_confidence: float
    """of a draft model: see `stopping`"""
    generated: int = 0
    biases: dict[str, RequestBias] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)
    """tokens that a draft model has yet to evaluate before it can draft, by its name; of those that have read
    the prompt"""
    spent_s: float = 0.0
    emitted: float = 0.0
    """what its steps took and its tokens; older ones count less in both"""
    decoded_s: float = 0.0
    explored_s: float = 0.0
    """of it, what went to learning how good a draft model is"""
    slowdown_steps: float = 0.0
    """how much longer than plain decoding it took so far, in plain steps"""
    backoff_steps: int = 0
    """steps for which draft models are not evaluated"""

    @property
    def context(self) -> int:
        """Tokens so far."""
        return self.prompt_tokens + self.generated

    def bias(self, name: str) -> RequestBias:
        """How a drafter's offers to this request differ from those to others."""
        return self.biases.setdefault(name, RequestBias())


@dataclass(frozen=True, slots=True)
class BatchState:
    """What shares a step's calls."""

    num_sequences: int
    context: int
    """tokens of all sequences so far"""
    others: int
    """tokens of the target's call that are no draft of the sequence in question nor its last token"""
    reward_s: float
    """λ (`objective`)"""
    reread: int | None = None
    """of `others`, those that a rejection has evaluated once more; None where it costs nothing"""

    @classmethod
    def of(
        cls,
        texts: Sequence[RequestState],
        state: PolicyState,
        others: int,
        requests: Sequence[DraftRequest] = (),
    ) -> BatchState:
        """These requests and their texts, with `others` more tokens in the call."""
        size, context = len(texts), sum(text.context for text in texts)
        plain_s = state.costs.call_s(size, context=context, num_sequences=size) + state.own_step_s
        spent_s, emitted = sum(text.spent_s for text in texts), sum(text.emitted for text in texts)
        reward_s = reward_per_token(spent_s, emitted, plain_s, size)
        counts = [request.reread for request in requests if request.reread is not None]
        reread = sum(counts) // size if counts else None
        return cls(size, context, size - 1 + others, reward_s, reread)


class PolicyState:
    """What is known across requests: costs, estimates and the engine's own time; learned from step
    records."""

    def __init__(self, costs: CallCosts, draft_costs: Mapping[str, CallCosts]) -> None:
        self.costs = costs
        self.draft_costs = dict(draft_costs)
        self.calibration: dict[str, Calibration] = {}
        self.confidence = ConfidenceModel()
        self.agreement = DrafterAgreement()
        self.own_step_s = 0.0
        """the engine's own time in a step, for each drafted token, and for each call of a draft model"""
        self.own_token_s = 0.0
        self.own_call_s = 0.0
        self.saved_steps = 0.0
        """plain steps that all texts together saved, within bounds"""
        self.num_rejected = 0
        """how often draft models were evaluated and not asked; each time that one is asked halves it"""
        self._estimators: dict[str, Estimator] = {}
        self._values: dict[tuple[int, ...], ContinuationValue] = {}
        self._values_at = 0
        self._marginal: MarginalCosts | None = None

    # Asking

    def new_request(self, prompt_tokens: int, max_tokens: int | None) -> RequestState:
        """A request of whose text nothing is known yet."""
        return RequestState(prompt_tokens, max_tokens, self.confidence.mean)

    def estimator(self, name: str, *, constrained: bool = False) -> Estimator:
        """The acceptance of a drafter's tokens; constrained text, where matches seldom go on, has its own."""
        key = f"{name} (constrained)" if constrained else name
        if key not in self._estimators:
            self._estimators[key] = Estimator(key)
        return self._estimators[key]

    def draft_cost(self, name: str) -> CallCosts:
        """What calls of a draft model cost."""
        if name not in self.draft_costs:
            self.draft_costs[name] = CallCosts()
        return self.draft_costs[name]

    def calls_s(self, most: int, batch: BatchState) -> Array:
        """Seconds of the target's call with 0 to `most` drafted tokens, the engine's own time for them
        included, shape (most + 1,)."""
        calls_s: Array = self.costs.calls_s(
            most + 1, context=batch.context, others=batch.others, num_sequences=batch.num_sequences
        ) + self.own_token_s * np.arange(most + 1)
        return calls_s

    def reread_s(self, calls_s: Array, batch: BatchState) -> Array | None:
        """What evaluating 0, 1, … tokens again adds to a call, and those besides that this one evaluates
        again (`StepCosts`); `calls_s` is that of `calls_s`."""
        if batch.reread is None:
            return None
        without = replace(batch, others=max(batch.others - batch.reread, 0))
        return calls_s - float(self.calls_s(0, without)[0])

    def marginal_costs(self, context: int) -> MarginalCosts:
        """What drafted tokens add to a call with so many tokens stored."""
        calls_s = self.costs.calls_s(MAX_TOKENS, context=context)
        if self._marginal is None or self._marginal.calls_s.base is not calls_s.base:
            self._marginal = MarginalCosts(calls_s)
        return self._marginal

    def step_costs(
        self,
        text: RequestState,
        model: str | None,
        max_length: int,
        batch: BatchState,
        max_prefix: int = MAX_LOOKUP_PREFIX,
    ) -> StepCosts:
        """What a step of this request costs and earns, with up to `max_prefix` lookup tokens before a
        model's."""
        context, size, reward_s = batch.context, batch.num_sequences, batch.reward_s
        calls_s = self.calls_s(max_length, batch)
        reread_s = self.reread_s(calls_s, batch)
        if model is None:
            return StepCosts(reward_s, calls_s, reread_s=reread_s)
        draft = self.draft_cost(model)
        uncached = draft.read_tokens(text.uncached.get(model, 1 + text.generated))
        draft_s = draft.calls_s(uncached + max_prefix, context=context, others=size - 1) + self.own_call_s
        if size > 1:  # the others draft as well, and bear their part
            draft_s = draft_s - draft.call_s(size - 1, context=context) * (size - 1) / size
        step_s, next_s = float(draft_s[0]), float(draft_s[1])
        return StepCosts(reward_s, calls_s, step_s, draft_s[uncached - 1 :], next_s - step_s, reread_s)

    def can_pay(self, model: str, context: int) -> bool:
        """Whether the draft model would pay if it were always correct."""
        step_s = self.draft_cost(model).call_s(1, context=context) + self.own_call_s
        marginal = self.marginal_costs(context)
        step = step_s / float(marginal.calls_s[0])
        return any(ratio + step * n < n for n, ratio in enumerate(marginal.ratios[:MAX_MODEL_DRAFT], 1))

    def continuation_value(self, costs: StepCosts, max_length: int) -> ContinuationValue:
        """The values of drafting on, up to `max_length` tokens, in plain calls: at these costs, or at others
        that are within a few per cent of them."""
        calls = costs.calls_s[: max_length + 1] / costs.calls_s[0]
        reread = None if costs.reread_s is None else costs.reread_s / costs.calls_s[0]
        step, reward, uncached = (
            seconds / float(costs.calls_s[0])
            for seconds in (costs.draft_step_s, costs.reward_s, costs.uncached_s)
        )
        if len(self._values) + self.confidence.num_learned >= self._values_at + _MAX_TABLE_AGE:
            self._values.clear()
            self._values_at = self.confidence.num_learned
        marks = [float(calls[len(calls) // 4]), float(calls[-1]), step, reward, uncached]
        marks += [] if reread is None else [float(reread[1])]
        key = (len(calls), *(round(math.log(max(mark, 1e-4)) / _LOG_COST_STEP) for mark in marks))
        if key not in self._values:
            self._values[key] = ContinuationValue(
                self.confidence.probs, calls, step, reward, uncached, reread
            )
        return self._values[key]

    # Learning

    def learn_own_time(self, decoding: Sequence[StepRecord]) -> None:
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

    def add_saved(self, steps: float) -> None:
        """A step took so many plain steps less than plain decoding."""
        self.saved_steps = min(max(self.saved_steps + steps, -_MAX_SAVED), _MAX_SAVED)

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """What was learned about acceptance, for the next session."""
        return {
            "schema": SCHEMA,
            "estimators": {name: known.as_json() for name, known in self._estimators.items()},
            "outlook": self.confidence.as_json(),
            "probing": asdict(self.agreement),
            "saved_steps": self.saved_steps,
        }

    def recall(self, data: Any) -> None:
        """Take over what an earlier session learned. Raises ValueError for anything but what `as_json`
        gave; then nothing is taken over."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            known = {name: Estimator.from_json(name, entry) for name, entry in data["estimators"].items()}
            confidence = ConfidenceModel.from_json(data["outlook"])
            agreement = DrafterAgreement.from_json(data["probing"])
            if not math.isfinite(saved := float(data["saved_steps"])):
                raise ValueError("what it saved is damaged")
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
        self._estimators, self.confidence, self.agreement = known, confidence, agreement
        self.saved_steps = 0.0
        self.add_saved(saved)
        self._values.clear()
        self._values_at = 0
