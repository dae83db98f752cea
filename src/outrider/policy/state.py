"""What a policy knows: the costs of calls, how good each drafter is, and about each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.core.contracts import DraftProgress, DraftRequest
from outrider.core.data import StepRecord
from outrider.core.files import parse_json
from outrider.costs import CallCosts
from outrider.policy.estimates import MEAN_CONFIDENCE, Estimator, RequestBias
from outrider.policy.objective import MAX_MODEL_DRAFT, Array, StepCosts, reward_per_token, token_ratio

SCHEMA = "outrider.acceptance/2"
CALIBRATION_KEY = "outrider.draft.acceptance"
"""In the metadata of a draft model's file, a string: what is known of its acceptance, in JSON. Confidence is
calibrated differently in every model."""

PretrainedCalibration = Mapping[str, Any]
"""What that says (`PolicyState.as_json`)."""

_OWN_RATE = 0.1
"""weight of a step in the mean of the engine's own times"""


@dataclass(slots=True)
class RequestState:
    """A request as far as it has come."""

    prompt_tokens: int
    max_tokens: int | None
    confidence: float
    """of the draft model: a moving average of its calibrated estimates"""
    generated: int = 0
    biases: dict[str, RequestBias] = field(default_factory=dict)
    draft: DraftProgress = field(default_factory=DraftProgress)
    """how far the draft model is with it"""
    spent_s: float = 0.0
    emitted: float = 0.0
    """what its steps took and its tokens; older ones count less in both"""
    model_gain: float = 0.0
    """what steps with the draft model gained over plain decoding, in plain steps"""

    @property
    def context(self) -> int:
        """Tokens so far."""
        return self.prompt_tokens + self.generated

    def bias(self, name: str) -> RequestBias:
        """How a drafter's offers to this request differ from those to others."""
        return self.biases.setdefault(name, RequestBias())


class PolicyState:
    """What is known across requests; `draft_costs` are those of the draft model's calls, if there is one."""

    def __init__(self, costs: CallCosts, draft_costs: CallCosts | None = None) -> None:
        self.costs = costs
        self.draft_costs = draft_costs or CallCosts()
        self.block = 1
        """tokens that a call of the draft model drafts"""
        self.verified = Counter[str]()
        self.accepted = Counter[str]()
        """drafted tokens that the target reached, and those that it accepted, by drafter"""
        self.mean_confidence = MEAN_CONFIDENCE
        """of the draft model, over all texts"""
        self.own_step_s = 0.0
        """the engine's own time in a step, for each drafted token, and for each call of the draft model"""
        self.own_token_s = 0.0
        self.own_call_s = 0.0
        self._estimators: dict[str, Estimator] = {}

    # Asking

    def new_request(self, prompt_tokens: int, max_tokens: int | None) -> RequestState:
        """A request of whose text nothing is known yet."""
        return RequestState(prompt_tokens, max_tokens, self.mean_confidence)

    def estimator(self, name: str, *, constrained: bool = False) -> Estimator:
        """The acceptance of a drafter's tokens; constrained text, where matches seldom go on, has its own."""
        key = f"{name} (constrained)" if constrained else name
        if key not in self._estimators:
            self._estimators[key] = Estimator(key)
        return self._estimators[key]

    def plain_step_s(self, context: int, num_sequences: int) -> float:
        """A step without drafts, of sequences that have so many tokens together."""
        return (
            self.costs.call_s(num_sequences, context=context, num_sequences=num_sequences) + self.own_step_s
        )

    def token_ratio(self, context: int, held: int, acceptance: float) -> float:
        """See `objective.token_ratio`: after so many tokens, of which the draft model holds `held`; 1 without
        one."""
        if not self.draft_costs.is_known:
            return 1.0
        step_s = self.draft_costs.call_s(1, context=held) + self.own_call_s
        return token_ratio(
            self.costs.calls_s(MAX_MODEL_DRAFT + 1, context=context), step_s, acceptance, self.block
        )

    def step_costs(
        self, texts: Sequence[RequestState], requests: Sequence[DraftRequest], others: int, most: int
    ) -> StepCosts:
        """What a step of these requests costs and earns, with up to `most` drafted tokens in all; the call
        evaluates `others` more tokens."""
        size, context = len(texts), sum(text.context for text in texts)
        others += size - 1

        def calls_s(others: int) -> Array:
            target_s = self.costs.calls_s(most + 1, context=context, others=others, num_sequences=size)
            found: Array = target_s + self.own_token_s * np.arange(most + 1)
            return found

        target_s = calls_s(others)
        recompute_s: Array | None = None
        again = [request.recomputed for request in requests if request.recomputed is not None]
        if again:
            recompute_s = target_s - calls_s(max(others - sum(again) // size, 0))[0]
        spent_s, emitted = sum(text.spent_s for text in texts), sum(text.emitted for text in texts)
        held, plain_s = sum(text.draft.held for text in texts), self.plain_step_s(context, size)
        ratio = self.token_ratio(context, held, self.mean_confidence)
        return StepCosts(reward_per_token(spent_s, emitted, plain_s, size, ratio), target_s, recompute_s)

    def with_model(self, costs: StepCosts, text: RequestState, held: int, size: int, most: int) -> StepCosts:
        """The step's costs where the draft model is asked too, after up to `most` tokens of lookups; `size`
        sequences, of which it holds so many tokens together, share its calls."""
        draft, unread = self.draft_costs, text.draft.unread
        draft_s = draft.calls_s(unread + most, context=held, others=size - 1) + self.own_call_s
        if size > 1:  # the others draft as well, and bear their part
            draft_s = draft_s - draft.call_s(size - 1, context=held) * (size - 1) / size
        return replace(
            costs, draft_step_s=float(draft_s[0]), first_draft_s=draft_s[unread - 1 :], block=self.block
        )

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
            "estimators": {name: {"weights": known.weights} for name, known in self._estimators.items()},
            "mean_confidence": self.mean_confidence,
        }

    def recall(self, data: Any) -> None:
        """Take over what an earlier session learned. Raises ValueError for anything but what `as_json`
        gave; then nothing is taken over."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            known = {
                name: Estimator(name, list(map(float, entry["weights"])))
                for name, entry in data["estimators"].items()
            }
            mean_confidence = float(data["mean_confidence"])
            if not 0 <= mean_confidence <= 1:
                raise ValueError("its mean confidence is damaged")
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error
        self._estimators, self.mean_confidence = known, mean_confidence


def read_calibration(text: str) -> PretrainedCalibration:
    """What a draft model's file says. Raises ValueError where it is damaged."""
    data: PretrainedCalibration = parse_json(text)
    PolicyState(CallCosts()).recall(data)
    return data
