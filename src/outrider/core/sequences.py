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
    return list(one[start : start + _BLOCK]) == list(other[start : start + _BLOCK])


class DraftPath(Generic[_Known]):
    """The drafted tokens of the last query, and what is known after each: successive queries mostly share a
    prefix, whose results are reused."""

    def __init__(self, start: _Known) -> None:
        self.tokens: list[int] = []
        self.known = [start]
        """before the first token, and after each"""

    def shared(self, drafted: Sequence[int]) -> int:
        return common_prefix(self.tokens, drafted)

    def cut(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:], self.known[num_tokens + 1 :]

    def append(self, token: int, known: _Known) -> None:
        self.tokens.append(token)
        self.known.append(known)

    def advance(self, num_tokens: int) -> None:
        """Drop so many tokens from the front: they were committed."""
        del self.tokens[:num_tokens], self.known[:num_tokens]
