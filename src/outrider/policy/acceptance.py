"""How likely a drafted token is to be accepted: what drafters say, corrected by what became of it.

A drafter's estimate becomes a few features; a logistic model of them is fitted in advance and goes on
learning, with a weight of evidence for each coefficient (assumed-density filtering, as in Opper's
"A Bayesian approach to on-line learning", 1998, with a diagonal covariance). What is particular to
one text is kept in a bias of its own, which begins at 0 with every request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, Self

from outrider.core.data import TokenEstimate

__all__ = ["Calibration", "Estimator", "TextState", "features"]

CERTAIN = 1.0
"""A drafter that knows (a forced span) says 1, and is taken at its word until it was wrong once."""

_LOOKUP = ("bias", "log match length", "log odds of the share", "lately right")
_MODEL = ("bias", "log odds")

_PRIORS: Mapping[str, tuple[float, ...]] = {
    "lookup": (-2.35, 1.0, 1.2, 0.65),
    "prediction": (-0.8, 1.0, 1.2, 0.65),
    "draft": (0.45, 1.1),
    "grammar (constrained)": (0.0, 1.0),
    "lookup (constrained)": (-3.6, 1.0, 1.2, 0.65),
}
"""Coefficients fitted to recorded texts (benchmarks/policy), by the drafter's name. Whoever predicts an
answer is right more often than a chance match is; a match within a schema's values less often (its first
coefficient was set after a look at benchmarks/structured, where one in six stood, not fitted)."""

_PRIOR_PRECISION = 40.0
"""of each coefficient: about what 400 judged tokens bring, of which most are all but certain"""
_MAX_PRECISION = 400.0
"""of a coefficient that an earlier session learned: what is new must still count"""
_BIAS_PRECISION = 4.0
"""of a text's own bias before any token: a standard deviation of 0.5 in log odds"""
_BIAS_MEMORY = 0.985
"""weight of older tokens in a text's bias: about the last 70 count"""
_LATELY = 0.8
"""weight of older offers in how a lookup fared lately"""


@dataclass(slots=True)
class TextState:
    """What one drafter's offers to one text have been worth so far."""

    bias: float = 0.0
    precision: float = _BIAS_PRECISION
    lately: float = 0.5
    """how often the first token of its offer was right, recent ones counting most"""

    def note_first(self, right: bool) -> None:
        """The first token of an offer, verified or not, turned out right or wrong."""
        self.lately = _LATELY * self.lately + (1 - _LATELY) * right


def features(estimate: TokenEstimate, lately: float) -> tuple[float, ...]:
    """The numbers that an estimate is weighed by. Lookups say how long a match was and how often it went on
    so; a draft model has its confidence."""
    if len(estimate.evidence) >= 3:
        length, count, total = estimate.evidence[:3]
        return (1.0, math.log(max(length, 1.0)), math.log((count + 0.5) / (total - count + 0.5)), lately)
    return (1.0, _log_odds(estimate.acceptance))


class Estimator:
    """The acceptance of one drafter's tokens, over all texts."""

    def __init__(self, name: str, weights: Sequence[float] | None = None) -> None:
        self.name = name
        self.weights = list(weights) if weights is not None else None
        self._precision: list[float] = []
        self._is_trusted = True

    def probability(self, estimate: TokenEstimate, state: TextState) -> float:
        """The probability that the token of this estimate is accepted, all before it given."""
        if estimate.acceptance >= CERTAIN and self._is_trusted:
            return 1.0
        return _sigmoid(self._score(features(estimate, state.lately)) + state.bias)

    def learn(self, estimate: TokenEstimate, state: TextState, right: bool) -> None:
        """A token that was offered with this estimate was judged."""
        if estimate.acceptance >= CERTAIN:
            self._is_trusted = self._is_trusted and right
            if self._is_trusted:
                return
        x = features(estimate, state.lately)
        score = self._score(x)
        probability = _sigmoid(score + state.bias)
        error, information = right - probability, probability * (1 - probability)
        state.precision = _BIAS_PRECISION + _BIAS_MEMORY * (state.precision - _BIAS_PRECISION) + information
        state.bias += error / state.precision
        weights, precision = self._known(len(x))
        for i, value in enumerate(x):
            precision[i] += information * value * value
            weights[i] += error * value / precision[i]

    @property
    def is_well_known(self) -> bool:
        """Whether as much was learned of this drafter as a session may take over from earlier ones."""
        return bool(self._precision) and self._precision[0] >= _MAX_PRECISION

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
            self.weights = list(_prior(self.name, size))
            self._precision = []
        if not self._precision:
            self._precision = [_PRIOR_PRECISION] * size
        return self.weights, self._precision


def _prior(name: str, size: int) -> tuple[float, ...]:
    """Fitted coefficients, for a drafter that has none those of its kind."""
    if name in _PRIORS and len(_PRIORS[name]) == size:
        return _PRIORS[name]
    kind = "lookup (constrained)" if name.endswith("(constrained)") else "lookup"
    return _PRIORS[kind] if size == len(_LOOKUP) else _PRIORS["draft"]


class Calibration:
    """Whether estimates come true: a reliability diagram and the Brier score, online.

    Bin i of `NUM_BINS` holds the estimates from i / NUM_BINS on.
    """

    NUM_BINS = 10

    def __init__(self) -> None:
        self.counts = [0] * self.NUM_BINS
        self.estimated = [0.0] * self.NUM_BINS
        self.accepted = [0] * self.NUM_BINS
        self._squares = 0.0

    def note(self, estimate: float, right: bool) -> None:
        """One judged token."""
        i = min(int(estimate * self.NUM_BINS), self.NUM_BINS - 1)
        self.counts[i] += 1
        self.estimated[i] += estimate
        self.accepted[i] += right
        self._squares += (estimate - right) ** 2

    @property
    def brier(self) -> float | None:
        """Mean squared error of the estimates; None before any."""
        return self._squares / sum(self.counts) if sum(self.counts) else None

    def as_json(self) -> dict[str, Any]:
        """The score and, for each bin that is not empty, mean estimate, share accepted and count."""
        bins = [
            {"estimated": e / n, "accepted": a / n, "tokens": n}
            for n, e, a in zip(self.counts, self.estimated, self.accepted, strict=True)
            if n
        ]
        return {"brier": self.brier, "bins": bins}


def _log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(clipped / (1 - clipped))


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))
