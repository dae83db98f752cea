"""What a policy knows: the costs of calls, how good each drafter is, and about each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.core.contracts import DraftRequest
from outrider.core.data import StepRecord
from outrider.costs import MAX_TOKENS, CallCosts
from outrider.policy.estimates import (
    MEAN_CONFIDENCE,
    Calibration,
    Estimator,
    RequestBias,
    TextConfidence,
)
from outrider.policy.objective import Array, StepCosts, reward_per_token

SCHEMA = "outrider.acceptance/2"

MAX_MODEL_DRAFT = 16
"""tokens; the prefix acceptance probability of longer drafts is small"""
MAX_CONSTRAINED_MODEL_DRAFT = 40
"""tokens, where a constraint forces a part of them"""
MAX_GUESS = 16
"""lookup tokens that a call of the draft model reads ahead"""
_MIN_USEFUL_SHARE = 0.5
"""Lookup tokens are not looked for where their prefix acceptance probability is below this share of the least
marginal cost of a token."""
_OWN_RATE = 0.1
"""weight of a step in the mean of the engine's own times"""


@dataclass(slots=True)
class RequestState:
    """A request as far as it has come."""

    prompt_tokens: int
    max_tokens: int | None
    confidence: TextConfidence
    """of the draft model"""
    generated: int = 0
    biases: dict[str, RequestBias] = field(default_factory=dict)
    uncached: int | None = None
    """tokens that the draft model has yet to evaluate before it can draft; None: it has not read the
    prompt"""
    spent_s: float = 0.0
    emitted: float = 0.0
    """what its steps took and its tokens; older ones count less in both"""
    decoded_s: float = 0.0
    explored_s: float = 0.0
    """of it, what went to learning how good a draft model is"""
    model_gain_steps: float = 0.0
    """what steps with the draft model gained over plain decoding, in plain steps"""

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
    recomputed: int | None = None
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
        reward_s = reward_per_token(spent_s, emitted, plain_s, size, state.token_ratio(context))
        counts = [request.recomputed for request in requests if request.recomputed is not None]
        recomputed = sum(counts) // size if counts else None
        return cls(size, context, size - 1 + others, reward_s, recomputed)


class MarginalCosts:
    """What drafted tokens add to a call of its own, in plain calls: for decisions without arithmetic on
    arrays, which takes a noticeable part of a small target's step. `calls_s` are calls over 1, 2, …
    tokens."""

    def __init__(self, calls_s: Array) -> None:
        self.calls_s = calls_s
        marginal = calls_s[1:] / calls_s[0] - 1.0
        self.ratios: list[float] = marginal.tolist()
        """of 1, 2, … drafted tokens together"""
        least = float((marginal / np.arange(1, len(calls_s))).min())
        self.min_useful_prob = min(_MIN_USEFUL_SHARE * least, 1.0)
        """the prefix acceptance probability below which a lookup token is not looked for"""

    def may_pay(self, acceptance: Sequence[float]) -> bool:
        """Whether drafting a candidate may pay, if a token takes no longer than a plain step."""
        prefix_prob, expected = 1.0, 0.0
        for probability, ratio in zip(acceptance, self.ratios, strict=False):
            prefix_prob *= probability
            expected += prefix_prob
            if expected >= ratio:
                return True
        return False

    def token_ratio(self, step_s: float, acceptance: float, block: int = 1) -> float:
        """What a token takes with drafts of the best length, in plain calls, where a draft model's step takes
        so long for a `block` of tokens, each of which is accepted with this probability."""
        step, prefix_prob, tokens, best = step_s / float(self.calls_s[0]), 1.0, 1.0, 1.0
        for n, ratio in enumerate(self.ratios[:MAX_MODEL_DRAFT], 1):
            prefix_prob *= acceptance
            tokens += prefix_prob
            best = min(best, (1 + ratio + -(-n // block) * step) / tokens)
        return best

    def can_pay(self, step_s: float, block: int = 1) -> bool:
        """Whether a draft model whose step takes so long would pay if it were always correct."""
        step, ratios = step_s / float(self.calls_s[0]), enumerate(self.ratios[:MAX_MODEL_DRAFT], 1)
        return any(ratio + step * -(-n // block) < n for n, ratio in ratios)


class PolicyState:
    """What is known across requests: costs, estimates and the engine's own time; learned from step
    records. `draft_costs` are those of the draft model's calls, if there is one."""

    def __init__(self, costs: CallCosts, draft_costs: CallCosts | None = None) -> None:
        self.costs = costs
        self.draft_costs = draft_costs or CallCosts()
        self.block = 1
        """tokens that a call of the draft model drafts"""
        self.calibration: dict[str, Calibration] = {}
        self.mean_confidence = MEAN_CONFIDENCE
        """of the draft model, over all texts"""
        self.own_step_s = 0.0
        """the engine's own time in a step, for each drafted token, and for each call of the draft model"""
        self.own_token_s = 0.0
        self.own_call_s = 0.0
        self._estimators: dict[str, Estimator] = {}
        self._marginal: MarginalCosts | None = None

    # Asking

    def new_request(self, prompt_tokens: int, max_tokens: int | None) -> RequestState:
        """A request of whose text nothing is known yet."""
        return RequestState(prompt_tokens, max_tokens, TextConfidence(self.mean_confidence))

    def estimator(self, name: str, *, constrained: bool = False) -> Estimator:
        """The acceptance of a drafter's tokens; constrained text, where matches seldom go on, has its own."""
        key = f"{name} (constrained)" if constrained else name
        if key not in self._estimators:
            self._estimators[key] = Estimator(key)
        return self._estimators[key]

    def calls_s(self, most: int, batch: BatchState) -> Array:
        """Seconds of the target's call with 0 to `most` drafted tokens, the engine's own time for them
        included, shape (most + 1,)."""
        calls_s: Array = self.costs.calls_s(
            most + 1, context=batch.context, others=batch.others, num_sequences=batch.num_sequences
        ) + self.own_token_s * np.arange(most + 1)
        return calls_s

    def recompute_s(self, calls_s: Array, batch: BatchState) -> Array | None:
        """What evaluating 0, 1, … tokens again adds to a call, and those besides that this one evaluates
        again (`StepCosts`); `calls_s` is that of `calls_s`."""
        if batch.recomputed is None:
            return None
        without = replace(batch, others=max(batch.others - batch.recomputed, 0))
        return calls_s - float(self.calls_s(0, without)[0])

    def marginal_costs(self, context: int) -> MarginalCosts:
        """What drafted tokens add to a call with so many tokens stored."""
        calls_s = self.costs.calls_s(MAX_TOKENS, context=context)
        if self._marginal is None or self._marginal.calls_s.base is not calls_s.base:
            self._marginal = MarginalCosts(calls_s)
        return self._marginal

    def step_costs(
        self, text: RequestState, max_length: int, batch: BatchState, max_prefix: int | None = None
    ) -> StepCosts:
        """What a step of this request costs and earns; with the draft model after up to `max_prefix` tokens
        of lookups, or without it (None)."""
        context, size, reward_s = batch.context, batch.num_sequences, batch.reward_s
        calls_s = self.calls_s(max_length, batch)
        recompute_s = self.recompute_s(calls_s, batch)
        if max_prefix is None:
            return StepCosts(reward_s, calls_s, recompute_s=recompute_s)
        draft = self.draft_costs
        uncached = draft.read_tokens(1 + text.generated if text.uncached is None else text.uncached)
        draft_s = draft.calls_s(uncached + max_prefix, context=context, others=size - 1) + self.own_call_s
        if size > 1:  # the others draft as well, and bear their part
            draft_s = draft_s - draft.call_s(size - 1, context=context) * (size - 1) / size
        read_s = draft_s[uncached - 1 :]
        return StepCosts(reward_s, calls_s, float(draft_s[0]), read_s, recompute_s, self.block)

    def model_can_pay(self, context: int) -> bool:
        """Whether the draft model would pay if it were always correct."""
        step_s = self.draft_costs.call_s(1, context=context) + self.own_call_s
        return self.marginal_costs(context).can_pay(step_s, self.block)

    def token_ratio(self, context: int) -> float:
        """What a token takes with the draft model's usual drafts, in plain calls; 1 without one."""
        if not self.draft_costs.is_known:
            return 1.0
        step_s = self.draft_costs.call_s(1, context=context) + self.own_call_s
        return self.marginal_costs(context).token_ratio(step_s, self.mean_confidence, self.block)

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

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """What was learned about acceptance, for the next session."""
        return {
            "schema": SCHEMA,
            "estimators": {name: known.as_json() for name, known in self._estimators.items()},
            "mean_confidence": self.mean_confidence,
        }

    def recall(self, data: Any) -> None:
        """Take over what an earlier session learned. Raises ValueError for anything but what `as_json`
        gave; then nothing is taken over."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            known = {name: Estimator.from_json(name, entry) for name, entry in data["estimators"].items()}
            mean_confidence = float(data["mean_confidence"])
            if not 0 <= mean_confidence <= 1:
                raise ValueError("its mean confidence is damaged")
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
        self._estimators, self.mean_confidence = known, mean_confidence
