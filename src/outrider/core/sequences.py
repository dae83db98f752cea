"""Sequences of tokens: compared, and walked along."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

_Known = TypeVar("_Known")

_BLOCK = 256
"""Tokens of long texts that are compared at once."""


def common_prefix(one: Iterable[int], other: Iterable[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = 0
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        size = min(len(one), len(other))
        while length + _BLOCK <= size and _are_equal(one, other, length):
            length += _BLOCK
        one, other = one[length : length + _BLOCK], other[length : length + _BLOCK]
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _are_equal(one: Sequence[int], other: Sequence[int], start: int) -> bool:
    """Whether two sequences have the same block from there on."""
    return list(one[start : start + _BLOCK]) == list(other[start : start + _BLOCK])


class DraftPath(Generic[_Known]):
    """The drafted tokens that were asked about last, and what is known after them.

    Drafts that are asked about one after another mostly begin alike: what is known of the shared tokens is
    worked out once.
    """

    def __init__(self, start: _Known) -> None:
        self.tokens: list[int] = []
        self.known = [start]
        """before the first token, and after each"""

    def shared(self, drafted: Sequence[int]) -> int:
        """How many of these tokens it begins with."""
        return common_prefix(self.tokens, drafted)

    def cut(self, num_tokens: int) -> None:
        """Keep so many tokens."""
        del self.tokens[num_tokens:], self.known[num_tokens + 1 :]

    def append(self, token: int, known: _Known) -> None:
        """Go on by a token, after which this is known."""
        self.tokens.append(token)
        self.known.append(known)

    def advance(self, num_tokens: int) -> None:
        """Begin after so many tokens: they were committed."""
        del self.tokens[:num_tokens], self.known[:num_tokens]
