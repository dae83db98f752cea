"""From logits to the distribution that plain decoding would sample from.

The order of the filters is llama.cpp's: top-k, top-p, min-p, temperature. The first three look
at the untempered probabilities, so the surviving set does not depend on the temperature. Target
and draft go through the same function: what comes out is exactly what a token is drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np
import numpy.typing as npt

from outrider.core.data import Distribution, Logits, SamplingParams
from outrider.core.errors import BackendError

_Row = npt.NDArray[np.float32]
_Tokens = npt.NDArray[np.int64]

_GROUP_SIZE = 64
"""Logits whose maximum stands for them all where a whole vocabulary would take too long."""


def point_mass(token: int) -> Distribution:
    """The distribution that is certain of one token."""
    return Distribution(np.array([token], dtype=np.int64), np.ones(1))


def probability(distribution: Distribution, token: int) -> float:
    """The probability of a token; 0 outside the support."""
    i = int(np.searchsorted(distribution.tokens, token))
    if i == len(distribution.tokens) or distribution.tokens[i] != token:
        return 0.0
    return float(distribution.probs[i])


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Draw a token by inverting the cumulative distribution: one uniform, none for a point mass."""
    if len(distribution.tokens) == 1:
        return int(distribution.tokens[0])
    cumulative = np.cumsum(distribution.probs)
    i = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return int(distribution.tokens[min(i, len(cumulative) - 1)])


def argmax(row: _Row) -> int:
    """The most likely token, the lowest id on a tie.

    Raises BackendError when the logits are not numbers (NaN, or no finite maximum).
    """
    token = int(row.argmax())
    if not math.isfinite(row[token]):
        raise BackendError("logits", f"the model returned {row[token]}", "The model file may be damaged.")
    return token


def confidence(row: _Row, token: int) -> float:
    """An estimate of the untempered probability of `token`, which must be the row's argmax.

    Only the largest logit of each group of a large vocabulary enters the sum, so it is never too
    low; on the logits of Qwen2.5-Coder 0.5B it is 0.004 too high in the mean, 0.022 at most, and takes
    a third of the time. Good enough to say how far to draft, not to sample from.
    """
    maxima = _group_maxima(row)
    with np.errstate(over="ignore"):  # far below the best is -inf, and that is right
        maxima -= row[token]
    np.exp(maxima, out=maxima)
    return min(1.0, 1.0 / float(maxima.sum()))


def _group_maxima(row: _Row) -> _Row:
    """The maximum of each of len(row) / 64 groups; a copy of the row where it is short.

    A group's members lie far apart, so that the maxima of all groups are found by comparing whole
    stretches of memory, several times as fast as neighbours would be.
    """
    num_groups = len(row) // _GROUP_SIZE
    if num_groups < _GROUP_SIZE:
        return row.copy()
    maxima: _Row = row[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    rest = row[num_groups * _GROUP_SIZE :]
    return np.concatenate([maxima, rest]) if len(rest) else maxima


def distribution(row: _Row, params: SamplingParams) -> Distribution:
    """The distribution that the next token is drawn from, given one row of logits.

    Raises BackendError when the logits are not numbers.
    """
    best = argmax(row)
    if params.temperature == 0 or params.top_k == 1:
        return point_mass(best)
    if not (params.top_k or params.min_p or params.top_p < 1):
        tokens, logits = _all_tokens(len(row)), row
    else:
        tokens, logits = _survivors(row, float(row[best]), params)
    with np.errstate(over="ignore"):  # at a tiny temperature all but the best are at -inf
        probs = np.exp((logits.astype(np.float64) - float(row[best])) / params.temperature)
    probs /= probs.sum()
    if not probs.all():
        tokens, probs = tokens[probs > 0], probs[probs > 0]
    return Distribution(tokens, probs)


@lru_cache(maxsize=8)
def _all_tokens(size: int) -> _Tokens:
    tokens = np.arange(size, dtype=np.int64)
    tokens.setflags(write=False)
    return tokens


def _survivors(row: _Row, best: float, params: SamplingParams) -> tuple[_Tokens, _Row]:
    """Tokens that pass top-k, top-p and min-p, in ascending order, and their logits."""
    tokens: _Tokens
    if params.top_k:
        tokens = _top_k(row, params.top_k)
        if params.top_p < 1:
            tokens = tokens[: _nucleus(row[tokens], best, params.top_p)]
    elif params.top_p < 1:
        tokens = _top_p(row, best, params.top_p)
    else:
        tokens = _all_tokens(len(row))
    if params.min_p:
        tokens = tokens[row[tokens] >= best + math.log(params.min_p)]
    tokens = np.sort(tokens)
    return tokens, row[tokens]


def _top_k(row: _Row, k: int) -> _Tokens:
    """The k most likely tokens, best first, ties by the lower id.

    A large vocabulary is never sorted: at least k logits reach the k-th largest group maximum,
    so everything below it is out, and what is left is hardly more than k.
    """
    maxima = _group_maxima(row)
    if k < len(maxima) < len(row):
        tokens = np.flatnonzero(row >= np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    else:
        tokens = _all_tokens(len(row))
    order = np.argsort(-row[tokens], kind="stable")[:k]
    return tokens[order]


def _top_p(row: _Row, best: float, top_p: float) -> _Tokens:
    """The smallest set of most likely tokens whose probability reaches `top_p`, best first."""
    with np.errstate(over="ignore"):
        total = float(np.exp(row - best).sum(dtype=np.float64))
    for k in (256, 4096, len(row)):
        tokens = _top_k(row, k)
        mass = np.cumsum(np.exp(row[tokens].astype(np.float64) - best)) / total
        if mass[-1] >= top_p:
            break
    return tokens[: int(np.searchsorted(mass, top_p)) + 1]


def _nucleus(logits: _Row, best: float, top_p: float) -> int:
    """How many of these descending logits it takes to reach `top_p` of their own probability."""
    mass = np.cumsum(np.exp(logits.astype(np.float64) - best))
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


class LazyDistributions(Sequence[Distribution]):
    """The distributions of several rows, each computed when it is first asked for.

    A rejected draft never looks at the rows behind the rejection.
    """

    def __init__(self, logits: Logits, params: SamplingParams) -> None:
        self._logits = logits
        self._params = params

    def __len__(self) -> int:
        return len(self._logits)

    @overload
    def __getitem__(self, index: int) -> Distribution: ...
    @overload
    def __getitem__(self, index: slice) -> list[Distribution]: ...
    def __getitem__(self, index: int | slice) -> Distribution | list[Distribution]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return distribution(self._logits[index], self._params)
