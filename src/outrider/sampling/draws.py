"""Distributions over tokens, and sampling from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution

_BLOCK_SIZE = 512
"""Probabilities that are summed together where a cumulative sum of all would take too long."""


def probability(distribution: Distribution, token: int) -> float:
    """The probability of a token; 0 outside the support."""
    i = int(np.searchsorted(distribution.tokens, token))
    if i == len(distribution.tokens) or distribution.tokens[i] != token:
        return 0.0
    return float(distribution.probs[i])


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Draw a token by inverting the cumulative distribution: one uniform, none for a point mass."""
    probs, first = distribution.probs, 0
    if len(probs) == 1:
        return int(distribution.tokens[0])
    uniform = rng.random()
    if len(probs) > 2 * _BLOCK_SIZE:
        sums = np.add.reduceat(probs, np.arange(0, len(probs), _BLOCK_SIZE))
        uniform *= float(sums.sum())
        block, uniform = _invert(sums, uniform)
        first = block * _BLOCK_SIZE
        probs = probs[first : first + _BLOCK_SIZE]
    else:
        uniform *= float(probs.sum())
    return int(distribution.tokens[first + _invert(probs, uniform)[0]])


def _invert(probs: npt.NDArray[np.float64], mass: float) -> tuple[int, float]:
    """The index at which the running sum exceeds `mass`, and what of it is left there."""
    cumulative = np.cumsum(probs)
    i = min(int(np.searchsorted(cumulative, mass, side="right")), len(probs) - 1)
    return i, mass - (float(cumulative[i - 1]) if i else 0.0)
