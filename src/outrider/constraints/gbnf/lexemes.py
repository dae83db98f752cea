"""Which regular parts of a grammar may be read by the longest match.

llguidance cuts text into lexemes by the longest match and parses these. GBNF knows no lexemes: any way
to derive the text counts. So a lexeme must not be able to go on where another one (or itself) is complete
and the next character could stand behind that. The lexemes' characters are numbered as in Glushkov's
automaton (1961), and all lexemes are read at once by the subset construction. What can stand behind is
taken from FOLLOW sets, rather too large than too small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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

_MAX_POSITIONS = 2000
_MAX_STATES = 1000
_MAX_REFERENCES = 50
_UNROLLED = 8
"""repetitions of a fixed number that are looked at one by one; more, or a range, count as any number"""


def too_greedy(rules: Mapping[str, Node], follows: Mapping[Node, CharSet]) -> set[Node]:
    """Those of some lexemes that would take text which belongs behind a lexeme. `follows` says what can
    stand behind each. A lexeme with more characters than are looked at counts as harmless."""
    return _Automaton(rules, follows).too_greedy()


@dataclass(slots=True)
class _Shape:
    nullable: bool
    firsts: set[int] = field(default_factory=set)
    lasts: set[int] = field(default_factory=set)


class _Automaton:
    def __init__(self, rules: Mapping[str, Node], follows: Mapping[Node, CharSet]) -> None:
        self._rules = rules
        self._chars: list[CharSet] = []
        self._next: list[set[int]] = []
        self._owners: list[Node] = []
        self._behind: dict[int, CharSet] = {}
        """by the positions that a lexeme may end with: what can stand behind it"""
        self._firsts: set[int] = set()
        for node, follow in follows.items():
            before = len(self._chars)
            shape = self._add(node, 0)
            self._owners += [node] * (len(self._chars) - before)
            if shape is not None:
                self._firsts |= shape.firsts
                self._behind |= dict.fromkeys(shape.lasts, follow)

    def too_greedy(self) -> set[Node]:
        greedy: set[Node] = set()
        open_states = [frozenset(self._firsts)]
        """by the positions that may be read next"""
        seen = set(open_states)
        while open_states and len(seen) <= _MAX_STATES:
            for read in self._steps(open_states.pop()):
                following = frozenset(j for i in read for j in self._next[i])
                behind = union(*(self._behind[i] for i in read if i in self._behind))
                greedy.update(self._owners[j] for j in following if overlap(self._chars[j], behind))
                if following not in seen:
                    seen.add(following)
                    open_states.append(following)
        return greedy

    def _steps(self, positions: frozenset[int]) -> set[frozenset[int]]:
        """Which of the positions are read together by one character."""
        edges = sorted({point for i in positions for a, b in self._chars[i] for point in (a, b + 1)})
        together = (frozenset(i for i in positions if overlap(self._chars[i], ((e, e),))) for e in edges)
        return {read for read in together if read}

    def _add(self, node: Node, depth: int) -> _Shape | None:
        """The positions of a part; None when there are too many."""
        if len(self._chars) >= _MAX_POSITIONS or depth > _MAX_REFERENCES:
            return None
        match node:
            case Chars(ranges):
                self._chars.append(ranges)
                self._next.append(set())
                here = {len(self._chars) - 1}
                return _Shape(False, here, set(here))
            case Sequence(items):
                return self._sequence(items, depth)
            case Choice(options):
                return self._choice(options, depth)
            case Repeat(item, least, most):
                return self._repeat(item, least, most, depth)
            case Reference(name):
                return self._add(self._rules[name], depth + 1)
            case Token():
                return None

    def _sequence(self, items: tuple[Node, ...], depth: int) -> _Shape | None:
        whole = _Shape(True)
        for item in items:
            if (shape := self._add(item, depth)) is None:
                return None
            self._link(whole.lasts, shape.firsts)
            whole.firsts |= shape.firsts if whole.nullable else set()
            whole.lasts = shape.lasts | (whole.lasts if shape.nullable else set())
            whole.nullable = whole.nullable and shape.nullable
        return whole

    def _choice(self, options: tuple[Node, ...], depth: int) -> _Shape | None:
        whole = _Shape(False)
        for option in options:
            if (shape := self._add(option, depth)) is None:
                return None
            whole.firsts |= shape.firsts
            whole.lasts |= shape.lasts
            whole.nullable = whole.nullable or shape.nullable
        return whole

    def _repeat(self, item: Node, least: int, most: int | None, depth: int) -> _Shape | None:
        if most == least <= _UNROLLED:
            return self._sequence((item,) * least, depth)
        if (shape := self._add(item, depth)) is None:
            return None
        if most != 1:
            self._link(shape.lasts, shape.firsts)
        shape.nullable = shape.nullable or least == 0
        return shape

    def _link(self, lasts: set[int], firsts: set[int]) -> None:
        for last in lasts:
            self._next[last] |= firsts
