"""The best, the k best and the fewest that reach a mass, without sorting a whole vocabulary."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from outrider.core.data import Row, TopLogits
from outrider.core.errors import BackendError

Tokens = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Floats = npt.NDArray[np.floating]

_GROUP_SIZE = 64
"""Logits in a group that its maximum represents: searching the whole vocabulary would take too long."""
_FIRST_GUESS, _NEXT_GUESS = 256, 16
"""As many of the largest values are tried first, and so many times as many where they were too few."""
_SUMMED_SIZE = 16384  # up to so many exponentials take no longer than finding the maximum of each group
_FARTHEST = 40.0  # a logit so far below the best has no probability that counts
_FEW = 32  # where at most one group in so many can hold a large value, its members alone are looked at


def argmax(row: Row | TopLogits) -> int:
    """The most likely token, the lowest id on a tie.

    Raises BackendError when the logits are not numbers (NaN, or no finite maximum).
    """
    if isinstance(row, TopLogits):
        _finite(row.logits[0])
        return int(row.tokens[0])
    best = int(row.argmax())
    _finite(row[best])
    return best


def _finite(best: np.float32) -> float:
    """The largest logit of a row (NaN where there is one in it)."""
    if not math.isfinite(best):
        raise BackendError("logits", f"the model returned {best}", "The model file may be damaged.")
    return float(best)


def most_likely(row: Row | TopLogits) -> tuple[int, float]:
    """The most likely token, the lowest id on a tie, and an estimate of its untempered probability, in one
    pass.

    Of a large vocabulary only the largest logit of each group enters the sum, so the probability is never too
    low; on the logits of Qwen2.5-Coder 0.5B it is 0.004 too high in the mean, 0.022 at most. Good enough to
    say how far to draft, not to sample from. Of TopLogits all are in the sum.

    Raises BackendError when the logits are not numbers (NaN, or no finite maximum).
    """
    if isinstance(row, TopLogits):
        return int(row.tokens[0]), share(row.logits, _finite(row.logits[0]))
    if len(row) <= _SUMMED_SIZE:
        token = int(row.argmax())
        return token, share(row, _finite(row[token]))
    maxima = _group_maxima(row)
    best = _finite(maxima[maxima.argmax()])
    token = min([_first_member(row, group) for group in (maxima == best).nonzero()[0].tolist()])
    return token, share(maxima, best)


def best_few(row: Row, k: int) -> tuple[TopLogits, Row]:
    """The k most likely tokens of a row, and the logits of which `most_likely` takes the first one's `share`,
    in one pass."""
    maxima = _group_maxima(row)
    tokens = _ranked(row, k, maxima)
    return TopLogits(tokens, row[tokens]), maxima if len(row) > _SUMMED_SIZE else row


def share(logits: Row, best: float) -> float:
    """The probability of the best of some logits."""
    if len(logits) <= _GROUP_SIZE:
        shifted: Floats = logits - np.float64(best)
    else:  # nothing overflows, and what weighs nothing is not made to
        shifted = np.maximum(logits, np.float32(best - _FARTHEST))
        shifted -= np.float32(best)
    return min(1.0, 1.0 / float(np.add.reduce(np.exp(shifted, out=shifted))))


def _first_member(row: Row, group: int) -> int:
    """The first token with the largest logit of a group (`_group_maxima`)."""
    num_groups = len(row) // _GROUP_SIZE
    grouped = num_groups * _GROUP_SIZE
    if group >= num_groups:  # one of the rest
        return grouped + group - num_groups
    return int(row[group:grouped:num_groups].argmax()) * num_groups + group


def _group_maxima(row: Row) -> Row:
    """The maximum of each of len(row) / 64 groups; the row itself where it is short.

    A group's members lie far apart, so that the maxima of all groups are found by comparing whole
    stretches of memory, several times as fast as neighbours would be.
    """
    num_groups = len(row) // _GROUP_SIZE
    if num_groups < _GROUP_SIZE:
        return row
    maxima: Row = row[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups).max(axis=0)
    rest = row[num_groups * _GROUP_SIZE :]
    return np.concatenate([maxima, rest]) if len(rest) else maxima


@lru_cache(maxsize=8)
def all_tokens(size: int) -> Tokens:
    """The ids of a whole vocabulary, shared and read-only."""
    tokens = np.arange(size, dtype=np.int64)
    tokens.setflags(write=False)
    return tokens


def ranked(values: Floats, k: int) -> Indices:
    """Indices of the k largest values (k > 0), best first, ties by the lower index.

    Raises BackendError where the largest is no number.
    """
    return _ranked(values, k, _group_maxima(values))


def _ranked(values: Floats, k: int, maxima: Floats) -> Indices:
    _finite(maxima[maxima.argmax()])
    pool = _pool(values, min(k, len(values)), maxima)
    return pool[(-values[pool]).argsort(kind="stable")[:k]]


def _pool(values: Floats, k: int, maxima: Floats) -> Indices:
    """Ascending indices of a few values, the k largest among them: at least k values reach the k-th largest
    group maximum, so the rest of a large vocabulary is out."""
    if len(values) <= _FIRST_GUESS or k == len(values):
        return all_tokens(len(values))
    if not k < len(maxima) < len(values):
        return np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    pool = _reaching(values, maxima, np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    if len(pool) < k:  # a constraint leaves few: the first of the barred ones complete them
        barred = np.flatnonzero(values[:k] == -math.inf)[: k - len(pool)]
        pool = np.sort(np.concatenate([pool, barred]))
    return pool


def _reaching(values: Floats, maxima: Floats, least: np.float32) -> Indices:
    """Ascending indices of the values of at least `least`; of those above -inf where it is that."""
    if least == -math.inf:
        return np.flatnonzero(values > least)
    groups = (maxima >= least).nonzero()[0]
    if len(groups) * _FEW > len(maxima):
        return np.flatnonzero(values >= least)
    num_groups = len(values) // _GROUP_SIZE
    num_full = int(groups.searchsorted(num_groups))
    members = (_member_offsets(num_groups) + groups[:num_full]).ravel()
    found: Indices = members[values[members] >= least]
    if num_full == len(groups):
        return found
    return np.concatenate([found, groups[num_full:] + num_groups * (_GROUP_SIZE - 1)])


@lru_cache(maxsize=8)
def _member_offsets(num_groups: int) -> Indices:
    """How far the members of a group lie behind its first, as a column."""
    return np.arange(0, num_groups * _GROUP_SIZE, num_groups)[:, np.newaxis]


def fewest_reaching(values: Floats, weights: Floats, mass: float, *, beyond: bool = False) -> Indices:
    """Ascending indices of the fewest largest values whose weights reach `mass`, or go `beyond`
    it; ties by the lower index. All of them when rounding keeps them short of it."""
    side: Literal["left", "right"] = "right" if beyond else "left"
    guess = _FIRST_GUESS
    while True:  # a few values mostly have the mass, and sorting all would take long
        order = ranked(values, guess)
        reached: npt.NDArray[np.float64] = weights[order].cumsum(dtype=np.float64)
        if reached[-1] > mass or guess >= len(values):
            return np.sort(order[: int(reached.searchsorted(mass, side)) + 1])
        guess *= _NEXT_GUESS
