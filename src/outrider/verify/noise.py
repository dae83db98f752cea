"""Noise that depends on a seed, a position and a token, and on nothing else.

Picking the token with the least exponential variate over its probability is drawing from the
distribution (the Gumbel trick, as a race of exponentials). Where two distributions race with the same
noise, they pick the same token with probability at least (1 - TV) / (1 + TV): Daliri et al. 2024
(2408.07978), theorem 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution

_STEP = 0x9E3779B97F4A7C15


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all others."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def uniforms(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One uniform variate in (0, 1) for each token, fixed by seed, position and token."""
    entropy = np.random.SeedSequence((seed, position)).generate_state(1, np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        bits = _mix(_mix(entropy + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)) + entropy)
    mantissas = (bits >> np.uint64(12)).astype(np.float64)
    chances: npt.NDArray[np.float64] = (mantissas + 0.5) * 2.0**-52
    return chances


def scores(distribution: Distribution, seed: int, position: int) -> npt.NDArray[np.float64]:
    """Log p plus Gumbel noise, for each token of the support; the greatest is picked."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniforms(seed, position, distribution.tokens)))
    return np.log(distribution.probs) + noise


def pick(distribution: Distribution, seed: int, position: int) -> int:
    """The token of the distribution that the noise of this position picks."""
    if len(distribution.tokens) == 1:
        return int(distribution.tokens[0])
    return int(distribution.tokens[np.argmax(scores(distribution, seed, position))])
