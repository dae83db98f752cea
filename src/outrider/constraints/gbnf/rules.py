"""The rules of a GBNF grammar: their parts, sets of characters, and which of these begin and follow parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from outrider.core.errors import GrammarError

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


# What is known of a grammar

_Value = TypeVar("_Value")


class Analysis:
    """Sets of characters count too much rather than too little. Raises GrammarError for a rule that no finite
    text follows."""

    def __init__(self, rules: dict[str, Node]) -> None:
        ending = _least(rules, False, partial(_completes, empty=False))
        if endless := [name for name in rules if not ending[name]]:
            why = f"the rule {endless[0]} can never be complete: it always leads to itself"
            raise GrammarError("grammar", why, "Give it a way out.")
        self._regular = _least(rules, False, _is_regular)
        self._nullable = _least(rules, False, partial(_completes, empty=True))
        self._firsts: Mapping[str, CharSet] = _least(rules, (), self._first)
        self.follows: dict[str, CharSet] = dict.fromkeys(rules, ())
        before: dict[str, CharSet] = {}
        while before != self.follows:
            before = dict(self.follows)
            for name, node in rules.items():
                self._propagate(node, self.follows[name])

    def is_regular(self, node: Node) -> bool:
        """Whether the part is a regular expression: no rule in it leads back to itself."""
        return _is_regular(node, self._regular)

    def nullable(self, node: Node) -> bool:
        """Whether the part matches the empty text."""
        return _completes(node, self._nullable, empty=True)

    def first(self, node: Node, follow: CharSet = ()) -> CharSet:
        """The characters that the part may begin with; where it may be empty, also those of `follow`."""
        return union(self._first(node, self._firsts), follow if self.nullable(node) else ())

    def parts(self, node: Node, follow: CharSet) -> list[tuple[Node, CharSet]]:
        """What the node is made of, each with what may come after it, given what may come after the node."""
        match node:
            case Sequence(items):
                backwards = []
                for item in reversed(items):
                    backwards.append((item, follow))
                    follow = self.first(item, follow)
                return backwards[::-1]
            case Repeat(item, _, most):
                return [(item, follow if most == 1 else union(self.first(item), follow))]
            case _:
                return [(child, follow) for child in children(node)]

    def _first(self, node: Node, known: Mapping[str, CharSet]) -> CharSet:
        match node:
            case Chars(ranges):
                return ranges
            case Reference(name):
                return known[name]
            case Sequence(items):
                last = next((i for i, item in enumerate(items) if not self.nullable(item)), len(items))
                return union(*(self._first(item, known) for item in items[: last + 1]))
            case _:
                return union(*(self._first(child, known) for child in children(node)))

    def _propagate(self, node: Node, follow: CharSet) -> None:
        if isinstance(node, Reference):
            self.follows[node.name] = union(self.follows[node.name], follow)
        for part, after in self.parts(node, follow):
            self._propagate(part, after)


def _least(
    rules: dict[str, Node], bottom: _Value, value: Callable[[Node, Mapping[str, _Value]], _Value]
) -> dict[str, _Value]:
    """The least fixed point of `value`, which takes a node and the values of the rules. Grammars are mostly
    written from the top down, so it is gathered from the last rule on."""
    known = dict.fromkeys(rules, bottom)
    before: dict[str, _Value] = {}
    while before != known:
        before = dict(known)
        for name, node in reversed(rules.items()):
            known[name] = value(node, known)
    return known


def _is_regular(node: Node, regular: Mapping[str, bool]) -> bool:
    if isinstance(node, Reference):
        return regular[node.name]
    return not isinstance(node, Token) and all(_is_regular(child, regular) for child in children(node))


def _completes(node: Node, known: Mapping[str, bool], *, empty: bool) -> bool:
    """Whether the part matches some finite text (`empty`: the empty one), given the rules that do."""
    match node:
        case Chars() | Token():
            return not empty
        case Reference(name):
            return known[name]
        case Choice(options):
            return any(_completes(option, known, empty=empty) for option in options)
        case Repeat(item, least):
            return least == 0 or _completes(item, known, empty=empty)
        case Sequence(items):
            return all(_completes(item, known, empty=empty) for item in items)
