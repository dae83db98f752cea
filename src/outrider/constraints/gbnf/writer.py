"""GBNF as Lark for llguidance: regular parts become lexemes wherever the longest match is right."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from outrider.constraints.gbnf.analysis import Analysis
from outrider.constraints.gbnf.nodes import (
    Chars,
    CharSet,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Token,
    overlap,
    union,
)
from outrider.constraints.gbnf.parser import parse


def gbnf_to_lark(text: str) -> str:
    """The grammar in Lark, which matches the same texts. Raises GrammarError.

    Regular parts are written as lexemes, as large as possible; those that would take too much are cut
    into their parts until none does. A single character never takes too much.
    """
    rules = parse(text)
    analysis = Analysis(rules)
    cut: set[Node] = set()
    while True:
        writer = _Writer(rules, analysis, cut)
        lark = writer.write()
        if not (greedy := _Automaton(rules, analysis, writer.follows).too_greedy()):
            return lark
        cut |= greedy


class _Writer:
    def __init__(self, rules: dict[str, Node], analysis: Analysis, cut: set[Node]) -> None:
        self.follows: dict[Node, CharSet] = {}
        """the characters that can follow each lexeme"""
        self._rules = rules
        self._analysis = analysis
        self._cut = cut
        self._names: dict[str, str] = {}
        self._terminals: dict[Node, str] = {}
        self._open_rules: deque[str] = deque()
        self._open_terminals: deque[Node] = deque()

    def write(self) -> str:
        lines = [f"start: {self._expression(Reference('root'), ())}"]
        while self._open_rules:
            name = self._open_rules.popleft()
            lines.append(
                f"{self._names[name]}: {self._expression(self._rules[name], self._analysis.follows[name])}"
            )
        while self._open_terminals:
            node = self._open_terminals.popleft()
            lines.append(f"{self._terminals[node]}: {self._lexical(node)}")
        return "\n".join([*lines, ""])

    def _expression(self, node: Node, follow: CharSet) -> str:
        """The part as the body of a rule, where `follow` may come after it."""
        if self._analysis.is_regular(node):
            lexeme = self._body(node)
            if lexeme not in self._cut:
                self.follows[lexeme] = union(self.follows.get(lexeme, ()), follow)
                return self._terminal(lexeme)
        match node:
            case Sequence(items):
                after = [self._analysis.first_of(items[i + 1 :], follow) for i in range(len(items))]
                return _joined(list(map(self._expression, items, after)))
            case Choice(options):
                return f"({' | '.join(self._expression(option, follow) for option in options)})"
            case Repeat(item, least, most):
                again = follow if most == 1 else union(self._analysis.first(item), follow)
                return f"({self._expression(item, again)}){_times(least, most)}"
            case Reference(name):
                return self._rule(name)
            case Token(spelling):
                return spelling
            case Chars():
                return self._terminal(node)

    def _body(self, node: Node) -> Node:
        while isinstance(node, Reference):
            node = self._rules[node.name]
        return node

    def _rule(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"r{len(self._names)}"
            self._open_rules.append(name)
        return self._names[name]

    def _terminal(self, node: Node) -> str:
        """The name of a lexeme, or of a part of one."""
        if node not in self._terminals:
            self._terminals[node] = f"T{len(self._terminals)}"
            self._open_terminals.append(node)
        return self._terminals[node]

    def _lexical(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return f"/[{''.join(map(_range, ranges))}]/"
            case Sequence(items):
                return _joined(list(map(self._lexical, items)))
            case Choice(options):
                return f"({' | '.join(map(self._lexical, options))})"
            case Repeat(item, least, most):
                return f"({self._lexical(item)}){_times(least, most)}"
            case _:
                return self._terminal(self._body(node))


def _joined(parts: list[str]) -> str:
    return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or '""'


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _range(ends: tuple[int, int]) -> str:
    first, last = (rf"\x{{{end:X}}}" for end in ends)
    return first if first == last else f"{first}-{last}"


# Which lexemes would take text that belongs after them. One that is too large to be looked at counts as
# harmless.

_MAX_POSITIONS = 2000
_MAX_PARTS = 20_000
_MAX_STATES = 1000
_MAX_REFERENCES = 50
_UNROLLED = 8
"""repetitions of a fixed number that are looked at one by one; more, or a range, count as any number"""


class _TooLarge(Exception):
    """A lexeme has more parts than are looked at."""


class _Automaton:
    """Glushkov's automaton of some lexemes: a state for each of their character sets ("position")."""

    def __init__(
        self, rules: Mapping[str, Node], analysis: Analysis, follows: Mapping[Node, CharSet]
    ) -> None:
        self._rules = rules
        self._nullable = analysis.nullable
        self._chars: list[CharSet] = []
        self._next: list[set[int]] = []
        self._num_parts = 0
        self._owners: list[Node] = []
        self._follow_at: dict[int, CharSet] = {}
        """by the positions that a lexeme may end with: what can follow it"""
        self._firsts: set[int] = set()
        for node, follow in follows.items():
            before, self._num_parts = len(self._chars), 0
            with suppress(_TooLarge):
                firsts, lasts = self._add(node, 0)
                self._firsts |= firsts
                self._follow_at |= dict.fromkeys(lasts, follow)
            self._owners += [node] * (len(self._chars) - before)

    def too_greedy(self) -> set[Node]:
        greedy: set[Node] = set()
        open_states = [frozenset(self._firsts)]
        """by the positions that may be read next"""
        seen = set(open_states)
        while open_states and len(seen) <= _MAX_STATES:
            for read in self._steps(open_states.pop()):
                following = frozenset(j for i in read for j in self._next[i])
                follow = union(*(self._follow_at[i] for i in read if i in self._follow_at))
                greedy.update(self._owners[j] for j in following if overlap(self._chars[j], follow))
                if following not in seen:
                    seen.add(following)
                    open_states.append(following)
        return greedy

    def _steps(self, positions: frozenset[int]) -> set[frozenset[int]]:
        """Which of the positions are read together by one character."""
        edges = sorted({point for i in positions for a, b in self._chars[i] for point in (a, b + 1)})
        together = (frozenset(i for i in positions if overlap(self._chars[i], ((e, e),))) for e in edges)
        return {read for read in together if read}

    def _add(self, node: Node, depth: int) -> tuple[set[int], set[int]]:
        """The positions that a part may begin and end with."""
        self._num_parts += 1
        is_large = len(self._chars) >= _MAX_POSITIONS or self._num_parts > _MAX_PARTS
        if is_large or depth > _MAX_REFERENCES:
            raise _TooLarge
        match node:
            case Chars(ranges):
                self._chars.append(ranges)
                self._next.append(set())
                here = len(self._chars) - 1
                return {here}, {here}
            case Sequence(items):
                return self._sequence(items, depth)
            case Choice(options):
                ends = [self._add(option, depth) for option in options]
                return set().union(*(first for first, _ in ends)), set().union(*(last for _, last in ends))
            case Repeat(item, least, most) if most == least <= _UNROLLED:
                return self._sequence((item,) * least, depth)
            case Repeat(item, _, most):
                firsts, lasts = self._add(item, depth)
                if most != 1:
                    self._link(lasts, firsts)
                return firsts, lasts
            case Reference(name):
                return self._add(self._rules[name], depth + 1)
            case Token():
                raise _TooLarge  # no lexeme has one

    def _sequence(self, items: tuple[Node, ...], depth: int) -> tuple[set[int], set[int]]:
        firsts: set[int] = set()
        lasts: set[int] = set()
        is_start = True
        for item in items:
            first, last = self._add(item, depth)
            self._link(lasts, first)
            firsts |= first if is_start else set()
            lasts = last | lasts if self._nullable(item) else last
            is_start = is_start and self._nullable(item)
        return firsts, lasts

    def _link(self, lasts: set[int], firsts: set[int]) -> None:
        for last in lasts:
            self._next[last] |= firsts
