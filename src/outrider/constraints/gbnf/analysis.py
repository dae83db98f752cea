"""What is known of a grammar's rules: which are regular, and which characters begin and follow them."""

from __future__ import annotations

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
    """Sets of characters count too much rather than too little. Grammars are mostly written from the top
    down, so what a rule has from those it refers to is gathered from the last rule on. Raises
    GrammarError for a rule that no finite text follows."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        _check_that_rules_end(rules)
        self._regular = self._find_regular()
        self._nullable: set[str] = set()
        self._firsts: dict[str, CharSet] = {name: () for name in rules}
        self._compute_firsts()
        self.follows: dict[str, CharSet] = {name: () for name in rules}
        self._compute_follows()

    def is_regular(self, node: Node) -> bool:
        """Whether the part is a regular expression: no rule in it leads back to itself."""
        match node:
            case Token():
                return False
            case Reference(name):
                return name in self._regular
            case _:
                return all(map(self.is_regular, children(node)))

    def nullable(self, node: Node) -> bool:
        """Whether the part matches the empty text."""
        match node:
            case Chars() | Token():
                return False
            case Sequence(items):
                return all(map(self.nullable, items))
            case Choice(options):
                return any(map(self.nullable, options))
            case Repeat(item, least):
                return least == 0 or self.nullable(item)
            case Reference(name):
                return name in self._nullable

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

    def _find_regular(self) -> set[str]:
        regular: set[str] = set()
        growing = True
        while growing:
            before = len(regular)
            for name, node in reversed(self._rules.items()):
                if name not in regular and _made_of(node, regular):
                    regular.add(name)
            growing = len(regular) > before
        return regular

    def _compute_firsts(self) -> None:
        growing = True
        while growing:
            before = (len(self._nullable), dict(self._firsts))
            for name, node in reversed(self._rules.items()):
                if self.nullable(node):
                    self._nullable.add(name)
                self._firsts[name] = self.first(node)
            growing = before != (len(self._nullable), self._firsts)

    def _compute_follows(self) -> None:
        growing = True
        while growing:
            before = dict(self.follows)
            for name, node in self._rules.items():
                self._propagate(node, self.follows[name])
            growing = before != self.follows

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


def _made_of(node: Node, regular: set[str]) -> bool:
    match node:
        case Token():
            return False
        case Reference(name):
            return name in regular
        case _:
            return all(_made_of(child, regular) for child in children(node))


def _check_that_rules_end(rules: dict[str, Node]) -> None:
    ending: set[str] = set()
    growing = True
    while growing:
        before = len(ending)
        for name, node in reversed(rules.items()):
            if name not in ending and _ends(node, ending):
                ending.add(name)
        growing = len(ending) > before
    for name in rules:
        if name not in ending:
            why = f"the rule {name} can never be complete: it always leads to itself"
            raise GrammarError("grammar", why, "Give it a way out.")


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Reference(name):
            return name in ending
        case Choice(options):
            return any(_ends(option, ending) for option in options)
        case Repeat(item, least):
            return least == 0 or _ends(item, ending)
        case _:
            return all(_ends(child, ending) for child in children(node))
