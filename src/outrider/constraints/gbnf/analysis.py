"""What is known of a grammar's rules: which are regular, and which characters begin and follow them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from outrider.constraints.gbnf.nodes import (
    Chars,
    CharSet,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Token,
    children,
    union,
)
from outrider.core.errors import GrammarError


class Analysis:
    """Sets of characters count too much rather than too little. Raises GrammarError for a rule that no finite
    text follows."""

    def __init__(self, rules: dict[str, Node]) -> None:
        ending = _closure(rules, _ends)
        if endless := [name for name in rules if name not in ending]:
            why = f"the rule {endless[0]} can never be complete: it always leads to itself"
            raise GrammarError("grammar", why, "Give it a way out.")
        self._regular = _closure(rules, _is_regular)
        self._nullable = _closure(rules, _is_nullable)
        self._firsts: dict[str, CharSet] = dict.fromkeys(rules, ())
        before: dict[str, CharSet] = {}
        while before != self._firsts:
            before = dict(self._firsts)
            for name, node in reversed(rules.items()):
                self._firsts[name] = self.first(node)
        self.follows: dict[str, CharSet] = dict.fromkeys(rules, ())
        before = {}
        while before != self.follows:
            before = dict(self.follows)
            for name, node in rules.items():
                self._propagate(node, self.follows[name])

    def is_regular(self, node: Node) -> bool:
        """Whether the part is a regular expression: no rule in it leads back to itself."""
        return _is_regular(node, self._regular)

    def nullable(self, node: Node) -> bool:
        """Whether the part matches the empty text."""
        return _is_nullable(node, self._nullable)

    def first(self, node: Node) -> CharSet:
        """The characters that the part may begin with."""
        match node:
            case Chars(ranges):
                return ranges
            case Token():
                return ()
            case Reference(name):
                return self._firsts[name]
            case Sequence(items):
                return self.first_of(items, ())
            case Choice(options):
                return union(*map(self.first, options))
            case Repeat(item):
                return self.first(item)

    def first_of(self, items: tuple[Node, ...], follow: CharSet) -> CharSet:
        """The characters that come first in a sequence with `follow` after it."""
        sets: list[CharSet] = []
        for item in items:
            sets.append(self.first(item))
            if not self.nullable(item):
                return union(*sets)
        return union(*sets, follow)

    def _propagate(self, node: Node, follow: CharSet) -> None:
        match node:
            case Reference(name):
                self.follows[name] = union(self.follows[name], follow)
            case Sequence(items):
                for i, item in enumerate(items):
                    self._propagate(item, self.first_of(items[i + 1 :], follow))
            case Choice(options):
                for option in options:
                    self._propagate(option, follow)
            case Repeat(item, _, most):
                self._propagate(item, follow if most == 1 else union(self.first(item), follow))
            case _:
                pass


def _closure(rules: dict[str, Node], holds: Callable[[Node, Collection[str]], bool]) -> set[str]:
    """The rules for which `holds`, given the rules for which it does: the least such set. Grammars are mostly
    written from the top down, so it is gathered from the last rule on."""
    found: set[str] = set()
    num_before = -1
    while len(found) > num_before:
        num_before = len(found)
        for name, node in reversed(rules.items()):
            if name not in found and holds(node, found):
                found.add(name)
    return found


def _is_regular(node: Node, regular: Collection[str]) -> bool:
    match node:
        case Token():
            return False
        case Reference(name):
            return name in regular
        case _:
            return all(_is_regular(child, regular) for child in children(node))


def _completes(node: Node, known: Collection[str], *, empty: bool) -> bool:
    """Whether the part matches some finite text (`empty`: the empty one), given the rules that do."""
    match node:
        case Chars() | Token():
            return not empty
        case Reference(name):
            return name in known
        case Choice(options):
            return any(_completes(option, known, empty=empty) for option in options)
        case Repeat(item, least):
            return least == 0 or _completes(item, known, empty=empty)
        case Sequence(items):
            return all(_completes(item, known, empty=empty) for item in items)


_ends = partial(_completes, empty=False)
_is_nullable = partial(_completes, empty=True)
