"""The best, the k best and the fewest that reach a mass, without sorting a whole vocabulary."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from outrider.core.data import Row
from outrider.core.errors import BackendError

Tokens = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.floating]

_GROUP_SIZE = 64
"""Logits in a group that its maximum represents: searching the whole vocabulary would take too long."""

_FIRST_GUESS = 256
"""As many of the largest values are tried before all of them are looked at."""

_POOL_SIZE = 2048
"""Values that may be sorted."""

_BINS = 4096

_SUMMED_SIZE = 16384
"""Up to so many exponentials take no longer than finding the maximum of each group."""

_BLOCK_SIZE = 16384

_SPAN = 256.0
"""Values that lie further than this below the largest share a bin: as logits or as surprises in
nats, such tokens have no weight that a number could hold."""


def argmax(row: Row) -> int:
    """The most likely token, the lowest id on a tie.

    Raises BackendError when the logits are not numbers (NaN, or no finite maximum).
    """
    token = int(row.argmax())
    if not math.isfinite(row[token]):
        raise BackendError("logits", f"the model returned {row[token]}", "The model file may be damaged.")
    return token


def confidence(row: Row, token: int) -> float:
    """An estimate of the untempered probability of `token`, which must be the row's argmax.

    Of a large vocabulary only the largest logit of each group enters the sum, so it is never too
    low; on the logits of Qwen2.5-Coder 0.5B it is 0.004 too high in the mean, 0.022 at most, and takes
    a third of the time. Good enough to say how far to draft, not to sample from.
    """
    maxima = row.copy() if len(row) <= _SUMMED_SIZE else _group_maxima(row)
    with np.errstate(over="ignore"):  # far below the best is -inf, and that is right
        maxima -= row[token]
    np.exp(maxima, out=maxima)
    return min(1.0, 1.0 / float(maxima.sum()))


def _group_maxima(row: Row) -> Row:
    """The maximum of each of len(row) / 64 groups; a copy of the row where it is short.

    A group's members lie far apart, so that the maxima of all groups are found by comparing whole
    stretches of memory, several times as fast as neighbours would be.
    """
    num_groups = len(row) // _GROUP_SIZE
    if num_groups < _GROUP_SIZE:
        return row.copy()
    maxima: Row = row[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    rest = row[num_groups * _GROUP_SIZE :]
    return np.concatenate([maxima, rest]) if len(rest) else maxima


@lru_cache(maxsize=8)
def all_tokens(size: int) -> Tokens:
    """The ids of a whole vocabulary, shared and read-only."""
    tokens = np.arange(size, dtype=np.int64)
    tokens.setflags(write=False)
    return tokens


def largest(values: Row, k: int) -> Indices:
    """Ascending indices of the k largest values (k > 0), ties by the lower index.

    At least k values reach the k-th largest group maximum: the rest of a large vocabulary is out.
    """
    if k >= len(values):
        return np.arange(len(values))
    maxima = _group_maxima(values)
    if not k < len(maxima) < len(values):
        return _largest(values, k)
    least = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    pool = np.flatnonzero(values >= least if least > -math.inf else values > -math.inf)
    if len(pool) < k:  # a constraint leaves few: the first of the barred ones complete them
        barred = np.flatnonzero(values[:k] == -math.inf)[: k - len(pool)]
        return np.sort(np.concatenate([pool, barred]))
    return pool[_largest(values[pool], k)]


def _largest(values: Row, k: int) -> Indices:
    if k == len(values):
        return np.arange(k)
    kth = np.partition(values, len(values) - k)[len(values) - k]
    kept = values >= kth
    surplus = int(np.count_nonzero(kept)) - k
    if surplus > 0:
        kept[np.flatnonzero(values == kth)[-surplus:]] = False
    return np.flatnonzero(kept)


def top_k(row: Row, k: int) -> Tokens:
    """The k most likely tokens (k > 0), best first, ties by the lower id."""
    tokens = largest(row, k)
    return tokens[np.argsort(-row[tokens], kind="stable")]


def fewest_reaching(values: Floats, weights: Floats, mass: float, *, beyond: bool = False) -> Indices:
    """Ascending indices of the fewest largest values whose weights reach `mass`, or go `beyond`
    it; ties by the lower index. All of them when rounding keeps them short of it."""
    taken = 0.0
    if len(values) <= _POOL_SIZE:
        order = np.arange(len(values))
    else:
        order = largest(values, _FIRST_GUESS)
        if float(weights[order].sum(dtype=np.float64)) <= mass:
            order, taken = _boundary(values, weights, mass, beyond)
    order = order[np.argsort(-values[order], kind="stable")]
    reached: npt.NDArray[np.float64] = taken + np.cumsum(weights[order], dtype=np.float64)
    last = order[min(_first_reaching(reached, mass, beyond), len(order) - 1)]
    kept = values >= values[last]
    ties = np.flatnonzero(values == values[last])
    kept[ties[ties > last]] = False
    return np.flatnonzero(kept)


def _first_reaching(reached: npt.NDArray[np.float64], mass: float, beyond: bool) -> int:
    return int(np.searchsorted(reached, mass, side="right" if beyond else "left"))


def _boundary(values: Floats, weights: Floats, mass: float, beyond: bool) -> tuple[Indices, float]:
    """Indices among which the running weight reaches `mass`, and the weight above them.

    A histogram of the weights over the values finds the bin where it happens, and another one
    divides that bin, until what is left is small enough to sort or all the same.
    """
    pool, taken = np.arange(len(values)), 0.0
    while len(pool) > _POOL_SIZE:
        span = min(float(values.max()) - float(values.min()), _SPAN)
        if span < 1e-30:
            break
        bins, totals = _histogram(values, weights, span)
        reached = taken + np.cumsum(totals)
        edge = min(_first_reaching(reached, mass, beyond), _BINS - 1)
        taken = float(reached[edge - 1]) if edge else taken
        inside = np.flatnonzero(bins == edge)
        pool, values, weights = pool[inside], values[inside], weights[inside]
    return pool, taken


def _histogram(
    values: Floats, weights: Floats, span: float
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.float64]]:
    """The bin of each value, counted from the largest down, and the weight in each bin.

    In blocks: large temporaries cost more to allocate than to fill.
    """
    highest = values.max()
    bins = np.empty(len(values), dtype=np.uint16)
    totals = np.zeros(_BINS)
    for start in range(0, len(values), _BLOCK_SIZE):
        block = slice(start, start + _BLOCK_SIZE)
        with np.errstate(over="ignore"):  # beyond every span, and so in the last bin
            steps = highest - values[block]
            steps *= (_BINS - 1) / span
        bins[block] = np.minimum(steps, _BINS - 1, out=steps)
        totals += np.bincount(bins[block], weights[block], minlength=_BINS)
    return bins, totals
