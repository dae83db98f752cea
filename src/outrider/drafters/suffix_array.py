"""Texts sorted by what precedes each token: the longest match is one binary search.

It is a suffix array of the reversed texts (Manber and Myers 1993), sorted by as many tokens as a match is
looked for. The longest suffix of another text that occurs anywhere is found in O(log n), without any state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt

from outrider.drafters.lookup import MIN_MATCH, IndexReader

DEPTH = 32
"""tokens of context that places are sorted by: the longest match that is distinguished from longer ones"""
SAMPLE = 32  # places that are looked at of those that match, evenly spread over them
BORDER = 0  # separates texts and surrounds them all; tokens are stored plus one
BYTES = 4
"""of a stored token, the most significant first: stored contexts compare as their bytes do"""
_CONTEXT = Struct(f">{DEPTH}I")
_AFTER_ALL = b"\xff"

Laid = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]


def lay_out(texts: Sequence[npt.ArrayLike]) -> Laid:
    """The texts as an index stores them: the last first and each from its end, `BORDER` between."""
    parts: list[npt.NDArray[np.uint32]] = [np.array([BORDER], np.uint32)]
    for text in reversed(texts):
        parts += [np.asarray(text, np.uint32)[::-1] + np.uint32(1), parts[0]]
    laid: Laid = np.concatenate([*parts, np.full(DEPTH, BORDER, np.uint32)])
    return laid.astype(">u4")


def sort_contexts(laid: Laid, on_round: Callable[[int, int], None] | None = None) -> Places:
    """The places that something follows, sorted by the `DEPTH` tokens from each on (backwards): by two first,
    then by twice as many in each round, of which the ranks of the last round are halves; only those that are
    still tied are sorted again. About 40 bytes a token. `on_round` is called with (done, total).
    """
    n, rounds = len(laid), DEPTH.bit_length() - 1
    keys = laid.astype(np.int64)
    keys[:-1] = keys[:-1] << 32 | keys[1:]
    order = np.argsort(keys).astype(np.int32)
    tied, keys = np.arange(n, dtype=np.int32), keys[order]
    ranks = np.zeros(n + DEPTH, np.int32)
    for done in range(1, rounds):
        if on_round:
            on_round(done, rounds)
        tied, keys = _rank(ranks, order, tied, keys)
        places = order[tied]
        keys = ranks[places].astype(np.int64) << 32 | ranks[places + 2**done]
        by_key = np.argsort(keys).astype(np.int32)
        order[tied], keys = places[by_key], keys[by_key]
    follows = (laid[order] != BORDER) & (laid[order - 1] != BORDER)
    sorted_places: Places = order[follows]
    return sorted_places


def _rank(ranks: Places, order: Places, slots: Places, keys: Keys) -> tuple[Places, Keys]:
    """Rank the places in these slots of the order, where each has its key: by the first slot with an
    equal one. Returns the slots, and keys, of those that share theirs."""
    new = np.ones(len(keys) + 1, np.bool_)
    new[1:-1] = keys[1:] != keys[:-1]
    ranks[order[slots]] = np.maximum.accumulate(np.where(new[:-1], slots, np.int32(0)))
    tied = ~(new[:-1] & new[1:])
    return slots[tied], keys[tied]


class ContextIndex:
    """Texts, laid out, and the sorted places in them."""

    def __init__(self, stored: bytes, places: Places) -> None:
        self._stored = stored
        self._places = places.data  # single items of a memoryview cost less than those of an array

    @classmethod
    def build(cls, texts: Sequence[npt.ArrayLike]) -> ContextIndex:
        """Index texts in memory; the last is the newest."""
        laid = lay_out(texts)
        return cls(laid.tobytes(), sort_contexts(laid))

    def search(self, text: Sequence[int], min_length: int = 1) -> tuple[list[int], int]:
        """At most `SAMPLE` places, and a length of at most `DEPTH`."""
        recent = text[: -DEPTH - 1 : -1]
        pattern = _CONTEXT.pack(*[token + 1 for token in recent], *[BORDER] * (DEPTH - len(recent)))
        places, context = self._places, self._context
        found = bisect_left(places, pattern, key=context)
        nearest = places[max(found - 1, 0) : found + 1]  # the two that agree with it longest
        length = max((_agreement(pattern, context(place)) for place in nearest), default=0)
        length = min(length, len(recent))
        if length < min_length:
            return [], length
        pattern = pattern[: length * BYTES]
        first = bisect_left(places, pattern, 0, found, key=context)
        end = bisect_left(places, pattern + _AFTER_ALL, found, key=context)
        step = max((end - first) // SAMPLE, 1)
        return sorted(places[first:end:step].tolist()[:SAMPLE]), length

    def _context(self, place: int) -> bytes:
        return self._stored[place * BYTES : (place + DEPTH) * BYTES]

    def follower(self, place: int) -> int:
        return int.from_bytes(self._stored[(place - 1) * BYTES : place * BYTES]) - 1

    def next(self, place: int) -> int:
        return place - 1  # texts are stored from their ends

    def reader(self, text: Sequence[int], min_match: int = MIN_MATCH) -> IndexReader:
        return IndexReader([self], text[-DEPTH:], min_match, DEPTH)


def _agreement(one: bytes, other: bytes) -> int:
    """How many tokens two contexts of the same size begin with in common."""
    differing = (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()
    return len(one) // BYTES - -(-differing // (8 * BYTES))
