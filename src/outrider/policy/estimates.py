"""How likely a drafted token is to be accepted: what drafters say, calibrated by what became of it.

A drafter's evidence becomes a few features; a logistic regression on them is fitted in advance
(benchmarks/policy/fit.py) and goes on learning from every offer. Each request has a bias of its own, which
begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

_LOOKUP_FEATURES = ("bias", "log match length", "log odds of the share", "recently right")

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

_RATE = 0.02
"""of learning, over all texts"""
_BIAS_RATE = 0.12
"""of learning, within one"""
_RECENT_MEMORY = 0.8
"""weight of older offers in how often a lookup was recently right"""

CONFIDENCE_MEMORY = 0.85
"""weight of the older tokens in a text's moving average of confidence"""
MEAN_CONFIDENCE = 0.82
"""over all texts, before any"""
MEAN_CONFIDENCE_RATE = 0.01
"""weight of a token in it: about the last 100 count"""


@dataclass(slots=True)
class RequestBias:
    """How one drafter's offers to one request differ from those to others."""

    value: float = 0.0
    """in log odds"""
    recently_right: float = 0.5
    """how often the first token of its offer was right: a moving average"""

    def note_first(self, correct: bool) -> None:
        """The first token of an offer, verified or not, turned out correct or not."""
        self.recently_right = _RECENT_MEMORY * self.recently_right + (1 - _RECENT_MEMORY) * correct


def features(evidence: Sequence[float], recently_right: float) -> tuple[float, ...]:
    """Of a lookup how long its match was and how often it went on so, of a draft model its confidence, and
    the token's place in a block."""
    if len(evidence) == 3:
        length, count, total = evidence
        share = math.log((count + 0.5) / (total - count + 0.5))
        return (1.0, math.log(max(length, 1.0)), share, recently_right)
    return (1.0, _log_odds(evidence[0]), *map(math.log, evidence[1:]))


class Estimator:
    """The acceptance of one drafter's tokens, over all texts."""

    def __init__(self, name: str, weights: Sequence[float] = ()) -> None:
        """`weights` are those of the features; none before any was seen. Raises ValueError where they are no
        numbers."""
        self.name = name
        self.weights = list(weights)
        if not all(map(math.isfinite, self.weights)):
            raise ValueError("its coefficients are damaged")

    def probability(self, evidence: Sequence[float], bias: RequestBias) -> float:
        """The probability that a token of this evidence is accepted, given that all before it were."""
        return self._probability(features(evidence, bias.recently_right), bias)

    def learn(self, evidence: Sequence[float], bias: RequestBias, correct: bool) -> None:
        """A token that was offered with this evidence was correct or not."""
        x = features(evidence, bias.recently_right)
        error = correct - self._probability(x, bias)
        bias.value += _BIAS_RATE * error
        self.weights = [weight + _RATE * error * value for weight, value in zip(self.weights, x, strict=True)]

    def _probability(self, x: Sequence[float], bias: RequestBias) -> float:
        if len(self.weights) != len(x):
            self.weights = list(initial_weights(self.name, len(x)))
        return _sigmoid(sum(map(mul, self.weights, x)) + bias.value)


def initial_weights(name: str, num_features: int) -> tuple[float, ...]:
    """A drafter's coefficients before it was ever asked; of one that has none of its own, those of its
    kind."""
    if name in INITIAL_WEIGHTS and len(INITIAL_WEIGHTS[name]) == num_features:
        return INITIAL_WEIGHTS[name]
    if num_features == len(INITIAL_WEIGHTS["block"]):
        return INITIAL_WEIGHTS["block"]
    kind = "lookup (constrained)" if name.endswith("(constrained)") else "lookup"
    return INITIAL_WEIGHTS[kind if num_features == len(_LOOKUP_FEATURES) else "draft"]


_CONFIRMED = (0.74, 0.88, 0.5)
_REFUSED = (-1.34, 1.08, -0.62)
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
    """A moving average of confidence after a token of this estimated acceptance."""
    return CONFIDENCE_MEMORY * average + (1 - CONFIDENCE_MEMORY) * acceptance


def _log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))
