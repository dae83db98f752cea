"""What a draft model's next tokens are worth before they are seen.

How sure a draft model will be of its next token is unknown until a step of it has been paid for. But
confidence comes in phases: a running mean of it tells how it will go on. `Outlook` learns the
distribution of the next token's acceptance by phase; `Values` solves the optimal stopping problem
that follows (backward induction over draft length, phase and the probability that all so far stands):
draft on as long as what the next steps are expected to bring, with the right to stop after each of
them, exceeds their cost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Outlook", "Values"]

Array = npt.NDArray[np.float64]

CLASS_EDGES = np.array([0.3, 0.5, 0.7, 0.85, 0.95, 0.985])
"""borders between classes of acceptance"""
CLASS_MEANS = np.array([0.21, 0.41, 0.61, 0.78, 0.91, 0.97, 0.997])
"""mean acceptance of each class"""
PHASES = np.array([0.42, 0.56, 0.67, 0.76, 0.84, 0.9, 0.95, 0.985])
"""the phases that are told apart"""
_PHASES: list[float] = PHASES.tolist()
MEMORY = 0.8
"""weight of the older tokens in the running mean that is the phase"""
USUAL_PHASE = 0.82
_USUAL_RATE = 0.005
"""weight of a token in the usual phase: about the last 200 count"""
_FADE = 0.95
"""how much of a phase is left after a token that the draft model did not see"""

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
"""shares of the classes in each phase, over recorded texts (benchmarks/policy)"""
_PRIOR_TOKENS = 60.0
"""how many tokens the prior of a phase counts for"""

_MAX_TOKENS = 400.0
"""how many tokens of earlier sessions count for a phase"""

_MIN_SURVIVAL = 0.01
_GRID = 24
_LOG_MIN = math.log(_MIN_SURVIVAL)
_LOG_GRID = np.linspace(_LOG_MIN, 0.0, _GRID)
_SURVIVALS = np.exp(_LOG_GRID)


class Outlook:
    """The distribution of the next drafted token's acceptance, by phase."""

    def __init__(self) -> None:
        self._counts = _PRIOR / _PRIOR.sum(axis=1, keepdims=True) * _PRIOR_TOKENS
        self.usual = USUAL_PHASE
        """the phase to expect where nothing is known of the text"""
        self.num_learned = 0
        """tokens that it learned from"""

    @staticmethod
    def advance(phase: float, acceptance: float) -> float:
        """The phase after a token with this estimated acceptance."""
        return MEMORY * phase + (1 - MEMORY) * acceptance

    def fade(self, phase: float, num_tokens: int) -> float:
        """The phase after tokens that the draft model did not draft."""
        return self.usual + (phase - self.usual) * _FADE**num_tokens

    def learn(self, phase: float, acceptance: float) -> None:
        """In this phase the next token had this estimated acceptance."""
        row = int(np.abs(PHASES - phase).argmin())
        self._counts[row, np.searchsorted(CLASS_EDGES, acceptance)] += 1
        self.usual += _USUAL_RATE * (acceptance - self.usual)
        self.num_learned += 1

    def as_json(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {"usual_phase": self.usual, "counts": self._counts.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The outlook that `as_json` made plain data of. Raises KeyError, TypeError or ValueError."""
        outlook, counts = cls(), np.asarray(data["counts"], dtype=np.float64)
        if counts.shape != _PRIOR.shape or not (np.isfinite(counts).all() and (counts > 0).all()):
            raise ValueError("its counts are damaged")
        # The past weighs no more than a few hundred tokens a phase, or nothing new could be learned.
        outlook._counts = counts * np.minimum(1.0, _MAX_TOKENS / counts.sum(axis=1, keepdims=True))
        outlook.usual = float(data["usual_phase"])
        if not 0 <= outlook.usual <= 1:
            raise ValueError("its usual phase is damaged")
        return outlook

    @property
    def shares(self) -> Array:
        """The probability of each class in each phase, shape (phases, classes)."""
        shares: Array = self._counts / self._counts.sum(axis=1, keepdims=True)
        return shares


class Values:
    """The expected gain of drafting on, in the unit of the prices: seconds, or plain calls.

    `calls_s[n]` is the target's call over a draft of n tokens, for n = 0 to the longest; `step_s` a
    draft step, and `bonus_s` what the next draft costs more behind a draft that stood as a whole (the
    draft model has not seen its last token); `token_s` is what an emitted token saves.
    """

    def __init__(
        self, shares: Array, calls_s: Array, step_s: float, token_s: float, bonus_s: float = 0.0
    ) -> None:
        self._longest = len(calls_s) - 1
        self._table = _solve(shares, calls_s, step_s, token_s, bonus_s)

    def draft_on(self, length: int, phase: float, survival: float) -> float:
        """The gain of at least one more draft step with `length` tokens drafted, of which all stand
        with probability `survival`, less the cost of everything from here on, the target's call included."""
        if length >= self._longest:
            return -math.inf
        low, share = _between(_PHASES, phase)
        x = (math.log(max(survival, _MIN_SURVIVAL)) - _LOG_MIN) / -_LOG_MIN * (_GRID - 1)
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


def _interpolation(grid: Array, values: Array) -> tuple[npt.NDArray[np.intp], Array]:
    low = np.clip(np.searchsorted(grid, values) - 1, 0, len(grid) - 2)
    share = np.clip((values - grid[low]) / (grid[low + 1] - grid[low]), 0.0, 1.0)
    return low, share


def _moves(grid: Array, values: Array) -> Array:
    """How linear interpolation on a grid weighs its points at each of some values, shape (*values, grid)."""
    low, share = _interpolation(grid, values)
    points: Array = np.eye(len(grid))
    return points[low] * (1 - share)[..., None] + points[low + 1] * share[..., None]


_PHASE_MOVES = _moves(PHASES, MEMORY * PHASES[:, None] + (1 - MEMORY) * CLASS_MEANS[None, :])
"""from phase to phase by a token of each class, shape (phases, classes, phases)"""
_SURVIVAL_MOVES = _moves(
    _LOG_GRID, np.maximum(_LOG_GRID[None, :] + np.log(CLASS_MEANS)[:, None], _LOG_GRID[0])
).reshape(-1, _GRID)
"""from survival to survival, shape (classes * survivals, survivals)"""
_TOKENS = CLASS_MEANS[:, None] * _SURVIVALS[None, :]
"""expected tokens of one more of each class, shape (classes, survivals)"""


def _solve(shares: Array, calls_s: Array, step_s: float, token_s: float, bonus_s: float) -> Array:
    """Backward induction; shape (lengths, phases, survivals). Written as products of matrices: a small
    model's step leaves little time for it."""
    longest, (num_phases, num_classes) = len(calls_s) - 1, shares.shape
    table = np.empty((longest, num_phases, _GRID))
    moves = (shares[:, :, None] * _PHASE_MOVES).reshape(num_phases, -1)
    earned_s = token_s * (shares @ _TOKENS) - step_s
    stop_s = -calls_s[:, None] - bonus_s * _SURVIVALS
    value = np.broadcast_to(stop_s[longest], (num_phases, _GRID))
    for length in range(longest - 1, -1, -1):
        moved = (_SURVIVAL_MOVES @ value.T).reshape(num_classes, _GRID, num_phases)
        table[length] = moves @ moved.transpose(0, 2, 1).reshape(-1, _GRID)
        table[length] += earned_s
        value = np.maximum(stop_s[length], table[length])
    return table
