"""Sequences of tokens, compared."""

from __future__ import annotations

from collections.abc import Iterable


def common_prefix(one: Iterable[int], other: Iterable[int]) -> int:
    """How many tokens two sequences begin with in common."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
