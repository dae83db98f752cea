"""How likely a drafted token is to be accepted: what drafters say, calibrated by what became of it.

A drafter's evidence becomes a few features; a logistic regression on them is fitted in advance
(benchmarks/policy/fit.py) and goes on learning online, with a precision for each coefficient (assumed-density
filtering, as in Opper's "A Bayesian approach to on-line learning", 1998, with a diagonal covariance). Each
request has a bias of its own, which begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Self

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

_PRIOR_PRECISION = 40.0
"""of each coefficient: about what 400 verified tokens bring, of which most are all but certain"""
_MAX_PRECISION = 400.0
"""of a coefficient that an earlier session learned: what is new must still count"""
_BIAS_PRECISION = 4.0
"""of a request's bias before any token: a standard deviation of 0.5 in log odds"""
_BIAS_MEMORY = 0.985
"""weight of older tokens in a request's bias: about the last 70 count"""
_RECENT_MEMORY = 0.8
"""weight of older offers in how often a lookup was recently right"""

CONFIDENCE_MEMORY = 0.85
"""weight of the older tokens in a text's moving average of confidence"""
MEAN_CONFIDENCE = 0.82
"""over all texts, before any"""
MEAN_CONFIDENCE_RATE = 0.01
"""weight of a token in it: about the last 100 count"""
_TEXT_PRIOR_TOKENS = 8.0
"""for which it counts in a text's own mean"""
_REVERSION = 0.95
"""how much of an average's distance from the mean is left after a token that the draft model did not see"""


@dataclass(slots=True)
class RequestBias:
    """How one drafter's offers to one request differ from those to others."""

    value: float = 0.0
    """in log odds"""
    precision: float = _BIAS_PRECISION
    recently_right: float = 0.5
    """how often the first token of its offer was right: a moving average"""

    def note_first(self, correct: bool) -> None:
        """The first token of an offer, verified or not, turned out correct or not."""
        self.recently_right = _RECENT_MEMORY * self.recently_right + (1 - _RECENT_MEMORY) * correct


def features(evidence: Sequence[float], recently_right: float) -> tuple[float, ...]:
    """The regression's features: of a lookup how long its match was and how often it went on so, of a draft
    model its confidence, and the token's place in a block."""
    if len(evidence) >= 3:
        length, count, total = evidence[:3]
        return (
            1.0,
            math.log(max(length, 1.0)),
            math.log((count + 0.5) / (total - count + 0.5)),
            recently_right,
        )
    return (1.0, _log_odds(evidence[0]), *map(math.log, evidence[1:]))


class Estimator:
    """The acceptance of one drafter's tokens, over all texts."""

    def __init__(self, name: str, weights: Sequence[float] | None = None) -> None:
        self.name = name
        self.weights = list(weights) if weights is not None else None
        self._precision: list[float] = []

    def probability(self, evidence: Sequence[float], bias: RequestBias) -> float:
        """The probability that a token of this evidence is accepted, given that all before it were."""
        return _sigmoid(self._score(features(evidence, bias.recently_right)) + bias.value)

    def learn(self, evidence: Sequence[float], bias: RequestBias, correct: bool) -> None:
        """A token that was offered with this evidence was correct or not."""
        x = features(evidence, bias.recently_right)
        probability = _sigmoid(self._score(x) + bias.value)
        error, information = correct - probability, probability * (1 - probability)
        bias.precision = _BIAS_PRECISION + _BIAS_MEMORY * (bias.precision - _BIAS_PRECISION) + information
        bias.value += error / bias.precision
        weights, precision = self._known(len(x))
        for i, value in enumerate(x):
            precision[i] += information * value * value
            weights[i] += error * value / precision[i]

    def as_json(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {"weights": self.weights, "precision": self._precision}

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Self:
        """The estimator that `as_json` made plain data of. Raises KeyError, TypeError or ValueError."""
        if data["weights"] is None:
            return cls(name)
        weights, precision = [float(w) for w in data["weights"]], [float(p) for p in data["precision"]]
        sound = all(map(math.isfinite, weights)) and all(p > 0 for p in precision)
        if len(weights) != len(precision) or not weights or not sound:
            raise ValueError("its coefficients are damaged")
        estimator = cls(name, weights)
        estimator._precision = [min(p, _MAX_PRECISION) for p in precision]
        return estimator

    def _score(self, x: Sequence[float]) -> float:
        return float(sum(map(mul, self._known(len(x))[0], x)))

    def _known(self, size: int) -> tuple[list[float], list[float]]:
        if self.weights is None or len(self.weights) != size:
            self.weights = list(initial_weights(self.name, size))
            self._precision = []
        if not self._precision:
            self._precision = [_PRIOR_PRECISION] * size
        return self.weights, self._precision


def initial_weights(name: str, num_features: int) -> tuple[float, ...]:
    """A drafter's coefficients before it was ever asked; of one that has none of its own, those of its
    kind."""
    if name in INITIAL_WEIGHTS and len(INITIAL_WEIGHTS[name]) == num_features:
        return INITIAL_WEIGHTS[name]
    kind = "lookup (constrained)" if name.endswith("(constrained)") else "lookup"
    if num_features == len(INITIAL_WEIGHTS["block"]):
        return INITIAL_WEIGHTS["block"]
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


class TextConfidence:
    """How confident a draft model is in one text: a moving average of its calibrated estimates.

    After tokens that it did not draft the average reverts to the text's own mean, which is the mean over all
    texts until the text has shown its own.
    """

    __slots__ = ("_count", "_sum", "average")

    def __init__(self, mean: float) -> None:
        self.average = mean
        self._sum, self._count = mean * _TEXT_PRIOR_TOKENS, _TEXT_PRIOR_TOKENS

    @staticmethod
    def after(average: float, acceptance: float) -> float:
        """The average after a token of this estimated acceptance."""
        return CONFIDENCE_MEMORY * average + (1 - CONFIDENCE_MEMORY) * acceptance

    @property
    def mean(self) -> float:
        """What to expect where nothing is known of the tokens before."""
        return self._sum / self._count

    def learn(self, acceptance: float) -> None:
        """A token of this estimated acceptance was offered where the text has come to."""
        self.average = self.after(self.average, acceptance)
        self._sum += acceptance
        self._count += 1

    def skip(self, num_tokens: int) -> None:
        """The text went on by tokens that the model did not draft."""
        self.average = self.mean + (self.average - self.mean) * _REVERSION**num_tokens


@dataclass(slots=True)
class Calibration:
    """Whether the estimates of a drafter's verified tokens come true."""

    tokens: int = 0
    accepted: int = 0
    squares: float = 0.0
    """of their errors, summed"""

    def note(self, estimate: float, correct: bool) -> None:
        """One verified token."""
        self.tokens += 1
        self.accepted += correct
        self.squares += (estimate - correct) ** 2

    @property
    def brier(self) -> float:
        """Mean squared error of the estimates."""
        return self.squares / self.tokens if self.tokens else 0.0


def _log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))
