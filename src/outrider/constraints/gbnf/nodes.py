"""The parts of a GBNF rule, and sets of characters."""

from __future__ import annotations

from dataclasses import dataclass

CharSet = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends included."""

LAST_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: CharSet


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; empty: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same, at least and at most so many times; None: without an end."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """Another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the vocabulary, in angle brackets."""

    spelling: str


Node = Chars | Sequence | Choice | Repeat | Reference | Token


def children(node: Node) -> tuple[Node, ...]:
    """What the node is made of."""
    match node:
        case Sequence(items) | Choice(items):
            return items
        case Repeat(item):
            return (item,)
        case _:
            return ()


def overlap(one: CharSet, other: CharSet) -> bool:
    """Whether a character is in both."""
    return any(a <= d and c <= b for a, b in one for c, d in other)


def union(*sets: CharSet) -> CharSet:
    """The characters of all, as ascending ranges that do not touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(piece for ranges in sets for piece in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: CharSet) -> CharSet:
    """All other characters."""
    taken = union(ranges)
    starts = [0, *(last + 1 for _, last in taken)]
    ends = [*(first - 1 for first, _ in taken), LAST_CODE_POINT]
    return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start <= end)
