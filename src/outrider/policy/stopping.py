"""Whether one more step of a draft model pays: an optimal stopping problem.

The confidence of a draft model's next token is unknown until its step was paid for, but it is autocorrelated:
its moving average predicts how it goes on. `ConfidenceModel` learns the distribution of the next token's
acceptance given that average, over a few classes. With length n, average m and prefix acceptance probability
p, the value is

    W(n, m, p) = max { −C(n) − b p,  Q(n, m, p) },
    Q(n, m, p) = −d + Σ_c P(c | m) [ λ p a_c + W(n + 1, m + (1 − γ)(a_c − m), p a_c) ],

with a draft step d, b what the next draft's first step costs more where all of this one is accepted, and the
rest as in `objective`. Solved by backward induction from the longest draft (T. S. Ferguson, "Optimal Stopping
and Applications", chapter 2); Q is the continuation value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from outrider.policy.objective import Array

CLASS_EDGES = np.array([0.3, 0.5, 0.7, 0.85, 0.95, 0.985])
"""borders between classes of acceptance"""
CLASS_MEANS = np.array([0.21, 0.41, 0.61, 0.78, 0.91, 0.97, 0.997])
"""mean acceptance of each class"""
AVERAGES = np.array([0.42, 0.56, 0.67, 0.76, 0.84, 0.9, 0.95, 0.985])
"""grid of the moving average"""
_AVERAGES: list[float] = AVERAGES.tolist()
MEMORY = 0.8
"""γ, the weight of the older tokens in the moving average"""
INITIAL_MEAN = 0.82
_MEAN_RATE = 0.005
"""weight of a token in the mean over all texts: about the last 200 count"""
_DECAY = 0.95
"""how much of an average's distance from the mean is left after a token that the draft model did not see"""

_PRIOR = np.array(
    [
        [0.17, 0.16, 0.27, 0.14, 0.13, 0.08, 0.05],
        [0.16, 0.22, 0.20, 0.12, 0.12, 0.08, 0.10],
        [0.11, 0.18, 0.19, 0.15, 0.13, 0.09, 0.15],
        [0.07, 0.15, 0.18, 0.15, 0.12, 0.08, 0.25],
        [0.04, 0.08, 0.13, 0.13, 0.14, 0.10, 0.38],
        [0.01, 0.03, 0.09, 0.10, 0.12, 0.10, 0.55],
        [0.01, 0.02, 0.07, 0.07, 0.10, 0.08, 0.65],
        [0.01, 0.01, 0.02, 0.03, 0.04, 0.05, 0.84],
    ]
)
"""P(class | average), over the recordings in benchmarks/policy"""
_PRIOR_TOKENS = 60.0
"""how many tokens each row of it counts for"""
_MAX_TOKENS = 400.0
"""how many tokens of earlier sessions count in a row"""

_MIN_PREFIX_PROB = 0.01
_GRID = 24
_LOG_MIN = math.log(_MIN_PREFIX_PROB)
_LOG_GRID = np.linspace(_LOG_MIN, 0.0, _GRID)
_PREFIX_PROBS = np.exp(_LOG_GRID)


class ConfidenceModel:
    """The distribution of a draft model's next acceptance given the moving average of the ones before."""

    def __init__(self) -> None:
        self._counts = _PRIOR / _PRIOR.sum(axis=1, keepdims=True) * _PRIOR_TOKENS
        self.mean = INITIAL_MEAN
        """of the moving average, over all texts: what to expect of a new one"""
        self.num_learned = 0
        """tokens that it learned from"""

    @staticmethod
    def update(average: float, acceptance: float) -> float:
        """The moving average after a token with this estimated acceptance."""
        return MEMORY * average + (1 - MEMORY) * acceptance

    def decay(self, average: float, num_tokens: int) -> float:
        """The moving average after tokens that the draft model did not draft: it reverts to the mean."""
        return self.mean + (average - self.mean) * _DECAY**num_tokens

    def learn(self, average: float, acceptance: float) -> None:
        """At this average the next token had this estimated acceptance."""
        row = int(np.abs(AVERAGES - average).argmin())
        self._counts[row, np.searchsorted(CLASS_EDGES, acceptance)] += 1
        self.mean += _MEAN_RATE * (acceptance - self.mean)
        self.num_learned += 1

    def as_json(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {"usual_phase": self.mean, "counts": self._counts.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The model that `as_json` made plain data of. Raises KeyError, TypeError or ValueError."""
        model, counts = cls(), np.asarray(data["counts"], dtype=np.float64)
        if counts.shape != _PRIOR.shape or not (np.isfinite(counts).all() and (counts > 0).all()):
            raise ValueError("its counts are damaged")
        # The past weighs no more than a few hundred tokens a row, or nothing new could be learned.
        model._counts = counts * np.minimum(1.0, _MAX_TOKENS / counts.sum(axis=1, keepdims=True))
        model.mean = float(data["usual_phase"])
        if not 0 <= model.mean <= 1:
            raise ValueError("its usual phase is damaged")
        return model

    @property
    def probs(self) -> Array:
        """P(class | average), shape (averages, classes)."""
        probs: Array = self._counts / self._counts.sum(axis=1, keepdims=True)
        return probs


class ContinuationValue:
    """Q(n, m, p), in the unit of the costs: seconds, or plain calls.

    `class_probs` are P(class | average), shape (averages, classes); `calls_s[n]` is the target's call with a
    draft of n tokens, n = 0 to the longest; `draft_step_s` is d, `uncached_s` b and `reward_s` λ; `reread_s`
    is as in `objective.StepCosts`.
    """

    def __init__(
        self,
        class_probs: Array,
        calls_s: Array,
        draft_step_s: float,
        reward_s: float,
        uncached_s: float = 0.0,
        reread_s: Array | None = None,
    ) -> None:
        self._max_length = len(calls_s) - 1
        reread_s = np.zeros_like(calls_s) if reread_s is None else reread_s
        self._table = _solve(class_probs, calls_s, draft_step_s, reward_s, uncached_s, reread_s)

    def at(self, length: int, average: float, prefix_prob: float) -> float:
        """The value of at least one more draft step with `length` tokens drafted, all accepted with
        `prefix_prob`, less the cost of everything from here on, the target's call included."""
        if length >= self._max_length:
            return -math.inf
        low, share = _between(_AVERAGES, average)
        x = (math.log(max(prefix_prob, _MIN_PREFIX_PROB)) - _LOG_MIN) / -_LOG_MIN * (_GRID - 1)
        i = min(int(x), _GRID - 2)
        part = x - i
        near, far = self._table[length, low : low + 2, i : i + 2].tolist()
        at, above = ((1 - part) * pair[0] + part * pair[1] for pair in (near, far))
        return float((1 - share) * at + share * above)


def _between(grid: Sequence[float], value: float) -> tuple[int, float]:
    """The grid point below a value and the share of the way to the next one."""
    low = min(max(bisect_left(grid, value) - 1, 0), len(grid) - 2)
    share = (value - grid[low]) / (grid[low + 1] - grid[low])
    return low, min(max(share, 0.0), 1.0)


def _moves(grid: Array, values: Array) -> Array:
    """How linear interpolation on a grid weighs its points at each of some values, shape (*values, grid)."""
    low = np.clip(np.searchsorted(grid, values) - 1, 0, len(grid) - 2)
    share = np.clip((values - grid[low]) / (grid[low + 1] - grid[low]), 0.0, 1.0)
    points: Array = np.eye(len(grid))
    return points[low] * (1 - share)[..., None] + points[low + 1] * share[..., None]


_AVERAGE_MOVES = _moves(AVERAGES, MEMORY * AVERAGES[:, None] + (1 - MEMORY) * CLASS_MEANS[None, :])
"""from average to average by a token of each class, shape (averages, classes, averages)"""
_PREFIX_MOVES = _moves(
    _LOG_GRID, np.maximum(_LOG_GRID[None, :] + np.log(CLASS_MEANS)[:, None], _LOG_GRID[0])
).reshape(-1, _GRID)
"""from prefix probability to prefix probability, shape (classes * grid, grid)"""
_TOKENS = CLASS_MEANS[:, None] * _PREFIX_PROBS[None, :]
"""expected tokens of one more of each class, shape (classes, grid)"""
_REJECTED = (1 - CLASS_MEANS[:, None]) * _PREFIX_PROBS[None, :]
"""probability that one more of each class is the first to be rejected, shape (classes, grid)"""


def _solve(
    class_probs: Array,
    calls_s: Array,
    draft_step_s: float,
    reward_s: float,
    uncached_s: float,
    reread_s: Array,
) -> Array:
    """Q by backward induction; shape (lengths, averages, grid). As products of matrices: a small model's step
    leaves little time for it."""
    longest, (num_averages, num_classes) = len(calls_s) - 1, class_probs.shape
    table = np.empty((longest, num_averages, _GRID))
    moves = (class_probs[:, :, None] * _AVERAGE_MOVES).reshape(num_averages, -1)
    earned_s = reward_s * (class_probs @ _TOKENS) - draft_step_s
    rejected = class_probs @ _REJECTED
    stop_s = -calls_s[:, None] - uncached_s * _PREFIX_PROBS
    value = np.broadcast_to(stop_s[longest], (num_averages, _GRID))
    for length in range(longest - 1, -1, -1):
        moved = (_PREFIX_MOVES @ value.T).reshape(num_classes, _GRID, num_averages)
        table[length] = moves @ moved.transpose(0, 2, 1).reshape(-1, _GRID)
        table[length] += earned_s - reread_s[length + 1] * rejected
        value = np.maximum(stop_s[length], table[length])
    return table
