"""Distributions over tokens, and sampling from them."""

from __future__ import annotations

import numpy as np

from outrider.core.data import Distribution


def probability(distribution: Distribution, token: int) -> float:
    """The probability of a token; 0 outside the support."""
    tokens = distribution.tokens
    i = 0 if len(tokens) == 1 else int(tokens.searchsorted(token))
    if i == len(tokens) or tokens[i] != token:
        return 0.0
    return float(distribution.probs[i])


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Draw a token by inverting the cumulative distribution: one uniform, none for a point mass."""
    if len(distribution.probs) == 1:
        return int(distribution.tokens[0])
    cumulative = distribution.probs.cumsum()
    i = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(distribution.tokens[min(i, len(cumulative) - 1)])
