"""The tokens that may still be sampled, and what every filter needs to know of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.data import Row, TopLogits
from outrider.sampling.selection import Floats, Indices, Tokens, all_tokens, argmax, largest

_SMALL = 4096
"""Up to so many candidates double precision costs nothing that matters."""

_NEGLIGIBLE = -1000.0
"""A logit so far below the best is as good as any other without weight, and can be squared."""


@dataclass(slots=True)
class Candidates:
    """Tokens in the order of their ids, and their logits, of which `best` is the largest.

    `num_impossible` tokens without any probability are not listed but are part of llama.cpp's list:
    dynamic temperature measures the entropy against the number of both.
    """

    tokens: Tokens
    logits: Row
    best: float
    num_impossible: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_listed(self) -> int:
        """How many candidates llama.cpp would have."""
        return len(self.tokens) + self.num_impossible

    def only(self, kept: Indices, num_impossible: int = 0) -> Candidates:
        """Those at the ascending indices `kept`."""
        logits = self.logits[kept]
        # In a whole vocabulary every token is its own index.
        tokens = kept if len(self) == self.tokens[-1] + 1 else self.tokens[kept]
        return Candidates(tokens, logits, float(logits.max()), num_impossible)

    def possible(self) -> Candidates:
        """Without those whose logit is -inf."""
        if self.logits.min() > -math.inf:
            return self
        kept = (self.logits > -math.inf).nonzero()[0]
        return self.only(kept, self.num_listed - len(kept))


def whole(row: Row) -> Candidates:
    """Every token of a vocabulary."""
    return Candidates(all_tokens(len(row)), row, float(row[argmax(row)]))


def top(row: Row | TopLogits, k: int) -> Candidates:
    """The k most likely tokens, ties by the lower id."""
    values = row.logits if isinstance(row, TopLogits) else row
    kept = largest(values, k)
    logits = values[kept]
    tokens = row.tokens[kept] if isinstance(row, TopLogits) else kept
    return Candidates(tokens, logits, float(logits.max()))


def softmax(candidates: Candidates, temperature: float) -> npt.NDArray[np.float64]:
    """The probability of each candidate; 0 where the exponential underflows.

    Large vocabularies are exponentiated in single precision, and normalised in double.
    """
    weights = _exponential(candidates, temperature).astype(np.float64, copy=False)
    weights *= 1.0 / float(weights.sum())
    return weights


def weights(candidates: Candidates) -> Floats:
    """Probabilities before temperature, relative to that of the best candidate."""
    return _exponential(candidates, 1.0)


def _exponential(candidates: Candidates, temperature: float) -> Floats:
    shifted: Floats
    if len(candidates) > _SMALL and 1e-3 <= temperature <= 1e3:
        with np.errstate(over="ignore"):  # far below the best is -inf, and that is right
            shifted = candidates.logits - np.float32(candidates.best)
            if temperature != 1:
                shifted *= np.float32(1 / temperature)
    else:
        shifted = candidates.logits.astype(np.float64)
        shifted -= candidates.best
        if temperature != 1:
            np.maximum(shifted, _NEGLIGIBLE * temperature, out=shifted)
            shifted /= temperature
    return np.exp(shifted, out=shifted)


@dataclass(frozen=True, slots=True)
class Surprise:
    """How much each candidate would surprise (-log of its probability before temperature, in
    nats), with its weight relative to the best, their sum, and the mean surprise: the entropy."""

    each: Floats
    weights: Floats
    total: float
    entropy: float


def surprise(candidates: Candidates) -> Surprise:
    """Measure the surprise of the candidates."""
    relative = weights(candidates)
    total = float(relative.sum(dtype=np.float64))
    depth: Floats = candidates.logits.astype(relative.dtype)
    with np.errstate(over="ignore"):
        depth -= depth.dtype.type(candidates.best)
    np.maximum(depth, _NEGLIGIBLE, out=depth)
    entropy = math.log(total) - float((relative * depth).sum(dtype=np.float64)) / total
    np.subtract(math.log(total), depth, out=depth)
    return Surprise(depth, relative, total, max(0.0, entropy))
