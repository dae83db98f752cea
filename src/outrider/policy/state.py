"""What a policy knows: the costs of calls, how likely drafted tokens are accepted, and about each request.

Acceptance is what drafters say, calibrated by what became of it. A drafter's evidence becomes a few features;
a logistic regression on them is fitted in advance (benchmarks/policy/fit.py) and goes on learning from every
offer. Each request has a bias of its own, which begins at 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

import numpy as np

from outrider.core.contracts import DraftProgress, DraftRequest
from outrider.core.data import StepRecord
from outrider.core.files import parse_json
from outrider.costs import CallCosts
from outrider.policy.objective import MAX_MODEL_DRAFT, Array, StepCosts, reward_per_token

INITIAL_WEIGHTS: dict[str, tuple[float, ...]] = {
    "lookup": (-2.35, 1.0, 1.2, 0.65),
    "prediction": (-0.8, 1.0, 1.2, 0.65),
    "earlier": (-2.9, 0.6, 0.9, 0.6),
    "draft": (0.45, 1.1),
    "block": (0.45, 1.1, 0.0),
    "grammar (constrained)": (0.0, 1.0),
    "lookup (constrained)": (-3.6, 1.0, 1.2, 0.65),
}
"""Coefficients by the drafter's name, fitted to the recordings in benchmarks/policy but for those of "block"
(the draft model's, for no real block drafter was at hand), and the first ones of "prediction" (a predicted
answer is right more often than a chance match) and of "lookup (constrained)" (set after
benchmarks/structured, where one in six was accepted)."""

_RATE, _BIAS_RATE = 0.02, 0.12  # of learning, over all texts and within one
_RECENT_MEMORY = 0.8  # weight of older offers in how often a lookup was recently right
_CONFIDENCE_MEMORY = 0.85  # weight of the older tokens in a text's moving average of confidence
MEAN_CONFIDENCE = 0.82  # over all texts, before any
MEAN_CONFIDENCE_RATE = 0.01  # weight of a token in it: about the last 100 count
GAIN_RATE = 0.2  # weight of an answer in the mean of what the draft model gained


@dataclass(slots=True)
class RequestBias:
    """How one drafter's offers to one request differ from those to others."""

    value: float = 0.0  # in log odds
    recently_right: float = 0.5  # how often the first token of an offer was, verified or not

    def note_first(self, correct: bool) -> None:
        self.recently_right = _RECENT_MEMORY * self.recently_right + (1 - _RECENT_MEMORY) * correct


def features(evidence: Sequence[float], recently_right: float) -> tuple[float, ...]:
    """A constant; of a lookup how long its match was, how often it went on so and was right lately; of a
    draft model its confidence, and the token's place in a block."""
    if len(evidence) == 3:
        length, count, total = evidence
        share = math.log((count + 0.5) / (total - count + 0.5))
        return (1.0, math.log(max(length, 1.0)), share, recently_right)
    return (1.0, _log_odds(evidence[0]), *map(math.log, evidence[1:]))


def initial_weights(name: str, num_features: int) -> tuple[float, ...]:
    """A drafter's coefficients before it was ever asked; of one that has none of its own, those of its
    kind."""
    kind = {4: "lookup", 3: "block", 2: "draft"}[num_features]
    constrained = f"{kind} (constrained)" if name.endswith("(constrained)") else kind
    known = (INITIAL_WEIGHTS.get(one, ()) for one in (name, constrained, kind))
    return next(weights for weights in known if len(weights) == num_features)


class Estimator:
    """The acceptance of one drafter's tokens, over all texts: `weights` of the features, none before any was
    seen. Raises ValueError where they are no numbers."""

    def __init__(self, name: str, weights: Sequence[float] = ()) -> None:
        self.name, self.weights = name, list(weights)
        if not all(map(math.isfinite, self.weights)):
            raise ValueError("its coefficients are damaged")

    def probability(self, evidence: Sequence[float], bias: RequestBias) -> float:
        """That a token of this evidence is accepted, given that all before it were."""
        return self._probability(features(evidence, bias.recently_right), bias)

    def learn(self, evidence: Sequence[float], bias: RequestBias, correct: bool) -> None:
        x = features(evidence, bias.recently_right)
        error = correct - self._probability(x, bias)
        bias.value += _BIAS_RATE * error
        self.weights = [weight + _RATE * error * value for weight, value in zip(self.weights, x, strict=True)]

    def _probability(self, x: Sequence[float], bias: RequestBias) -> float:
        if len(self.weights) != len(x):
            self.weights = list(initial_weights(self.name, len(x)))
        return _sigmoid(sum(map(mul, self.weights, x)) + bias.value)


_CONFIRMED, _REFUSED = (0.74, 0.88, 0.5), (-1.34, 1.08, -0.62)
"""Constant, lookup's log odds, draft model's: whether a lookup's token is right where the draft model says
the same, and where it says another; fitted to recordings of two pairs in equal parts."""


def confirmed(lookup: float, model: float) -> float:
    """The acceptance of a token that a lookup and the draft model both offer, by what each says of it."""
    return _joined(_CONFIRMED, lookup, model)


def refused(lookup: float, model: float) -> tuple[float, float]:
    """The acceptance of a lookup's token and of the draft model's where they differ."""
    left = _joined(_REFUSED, lookup, model)
    return left, (1 - left) * model


def _joined(weights: tuple[float, float, float], lookup: float, model: float) -> float:
    return _sigmoid(weights[0] + weights[1] * _log_odds(lookup) + weights[2] * _log_odds(model))


def average_after(average: float, acceptance: float) -> float:
    """The moving average of confidence after a token of this estimated acceptance."""
    return _CONFIDENCE_MEMORY * average + (1 - _CONFIDENCE_MEMORY) * acceptance


def _log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))


@dataclass(slots=True)
class RequestState:
    """A request as far as it has come."""

    prompt_tokens: int
    max_tokens: float
    confidence: float  # of the draft model: a moving average of its calibrated estimates
    generated: int = 0
    biases: defaultdict[str, RequestBias] = field(default_factory=lambda: defaultdict(RequestBias))
    draft: DraftProgress = field(default_factory=DraftProgress)
    spent_s: float = 0.0
    emitted: float = 0.0  # what its steps took and its tokens; older ones count less in both
    model_gain: float = 0.0  # what steps with the draft model gained over plain decoding, in plain steps

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.generated


SCHEMA = "outrider.acceptance/2"
CALIBRATION_KEY = "outrider.draft.acceptance"
"""In the metadata of a draft model's file: what is known of its acceptance, in JSON. Confidence is calibrated
differently in every model."""
PretrainedCalibration = Mapping[str, Any]
"""What that says (`PolicyState.as_json`)."""

# Of calls without drafts, the most frequent ones, only one of so many is learned from once enough were seen:
# learning takes a noticeable part of a small model's step.
_MIN_OBSERVED, _PLAIN_INTERVAL = 16, 8
_OWN_RATE = 0.1  # weight of a step in the mean of the engine's own times


class PolicyState:
    """What is known across requests; `draft_costs` are those of the draft model's calls, if there is one."""

    def __init__(self, costs: CallCosts, draft_costs: CallCosts | None = None) -> None:
        self.costs = costs
        self.draft_costs = draft_costs or CallCosts()
        self.block = 1  # tokens that a call of the draft model drafts
        self.verified = Counter[str]()  # drafted tokens that the target reached, by drafter
        self.accepted = Counter[str]()  # and those that it accepted
        self.mean_confidence = MEAN_CONFIDENCE
        self.usual_gain = 0.0  # what the draft model gained in an answer lately, in plain steps
        # The engine's own time in a step, for each drafted token, and for each call of the draft model.
        self.own_step_s = self.own_token_s = self.own_call_s = 0.0
        self._last_tokens = 0  # of the last call
        self._estimators: dict[str, Estimator] = {}

    # Asking

    def new_request(self, prompt_tokens: int, max_tokens: int | None) -> RequestState:
        return RequestState(prompt_tokens, max_tokens or math.inf, self.mean_confidence)

    def estimator(self, name: str, *, constrained: bool = False) -> Estimator:
        """The acceptance of a drafter's tokens; constrained text, where matches seldom go on, has its own."""
        key = f"{name} (constrained)" if constrained else name
        if key not in self._estimators:
            self._estimators[key] = Estimator(key)
        return self._estimators[key]

    def plain_step_s(self, context: int, num_sequences: int) -> float:
        """A step without drafts, of sequences that have so many tokens together."""
        return self.costs.call_s(num_sequences, context=context) + self.own_step_s

    def token_ratio(self, context: int, held: int, acceptance: float) -> float:
        """What a token takes, in plain calls, in drafts of the best length by the draft model, which holds so
        many tokens, if each is accepted with this probability; 1 where none pays."""
        if not self.draft_costs.is_known:
            return 1.0
        n = np.arange(MAX_MODEL_DRAFT + 1)
        calls_s = self.costs.calls_s(len(n), context=context)
        step_s = self.draft_costs.call_s(1, context=held) + self.own_call_s
        steps_s = calls_s - (-n // self.block) * step_s  # a block is drafted in one
        return float((steps_s / np.cumsum(acceptance**n)).min() / calls_s[0])

    def step_costs(
        self, texts: Sequence[RequestState], requests: Sequence[DraftRequest], others: int, most: int
    ) -> StepCosts:
        """What a step of these requests costs and earns, with up to `most` drafted tokens in all; the call
        evaluates `others` more tokens."""
        size, context = len(texts), sum(text.context for text in texts)
        others += size - 1
        target_s = self.costs.calls_s(most + 1, context=context, others=others)
        target_s = target_s + self.own_token_s * np.arange(most + 1) + self.costs.switch_s
        if others < self._last_tokens <= others + 1 + most:
            target_s[self._last_tokens - others - 1] -= self.costs.switch_s
        recompute_s: Array | None = None
        if again := [request.recomputed for request in requests if request.recomputed is not None]:
            first = max(others - sum(again) // size, 0) + 1
            recompute_s = target_s - self.costs.call_s(first, context=context)
        spent_s, emitted = sum(text.spent_s for text in texts), sum(text.emitted for text in texts)
        held, plain_s = sum(text.draft.held for text in texts), self.plain_step_s(context, size)
        ratio = self.token_ratio(context, held, self.mean_confidence)
        reward_s = reward_per_token(spent_s, emitted, plain_s, size, ratio)
        return StepCosts(reward_s, target_s, recompute_s, plain_s, size)

    def with_model(self, costs: StepCosts, text: RequestState, held: int, most: int) -> StepCosts:
        """The step's costs where the draft model is asked too, after up to `most` tokens of lookups; it holds
        so many tokens of all sequences, which share its calls."""
        draft, unread, size = self.draft_costs, text.draft.unread, costs.num_sequences
        draft_s = draft.calls_s(unread + most, context=held, others=size - 1) + self.own_call_s
        if size > 1:  # the others draft as well, and bear their part
            draft_s = draft_s - draft.call_s(size - 1, context=held) * (size - 1) / size
        step_s, first_s = float(draft_s[0]), draft_s[unread - 1 :]
        return replace(costs, draft_step_s=step_s, first_draft_s=first_s, block=self.block)

    # Learning

    def learn_costs(self, records: Sequence[StepRecord], held: int) -> None:
        """What the calls of a step took, of a draft model that held so many tokens. Calls over prompts and
        drafts together tell nothing clear."""
        first, work, draft = records[0], records[0].work, self.draft_costs
        decoding = [record for record in records if record.kind == "decode" and not record.read_tokens]
        context, size = sum(record.position for record in records), len(records)
        is_due = self.costs.num_observed < _MIN_OBSERVED or first.step % _PLAIN_INTERVAL == 0
        switch_s = 0.0 if first.batch_tokens == self._last_tokens else self.costs.switch_s
        self._last_tokens = first.batch_tokens
        if len(decoding) == size and (is_due or first.batch_tokens > size):
            self.costs.observe(first.batch_tokens, first.verify_s - switch_s, context=context)
        elif not decoding:
            self.costs.observe_prefill(first.batch_tokens, first.verify_s + first.read_s, context=context)
        if not work.calls and is_due:
            draft.follow(self.costs, held)
        expected_s = [draft.call_s(n, context=held) for n in work.call_tokens]
        for n, seconds in zip(work.call_tokens, expected_s, strict=True):
            draft.observe(n, seconds * work.model_s / sum(expected_s), context=held)
        if work.prefill_calls:
            before = max(held - work.prefill_tokens, 0)
            draft.observe_prefill(work.prefill_tokens, work.prefill_s, context=before)
        if decoding:
            self.learn_own_time(decoding)

    def learn_own_time(self, decoding: Sequence[StepRecord]) -> None:
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
