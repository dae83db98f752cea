"""GBNF as Lark for llguidance: regular parts become lexemes wherever the longest match is right."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.constraints.gbnf.parser import parse
from outrider.constraints.gbnf.rules import (
    Analysis,
    Chars,
    CharSet,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Token,
    children,
    overlap,
    union,
)


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
    def __init__(self, rules: Mapping[str, Node], analysis: Analysis, cut: set[Node]) -> None:
        self.follows: dict[Node, CharSet] = {}
        """the characters that can follow each lexeme"""
        self._rules = rules
        self._analysis = analysis
        self._cut = cut
        self._names: dict[Node, str] = {}
        """of rules (by their references) and of lexemes and parts of them"""
        self._to_write: list[Node] = []

    def write(self) -> str:
        lines = [f"start: {self._expression(Reference('root'), ())}"]
        for node in self._to_write:  # which grows meanwhile
            if isinstance(node, Reference):
                body = self._expression(self._rules[node.name], self._analysis.follows[node.name])
            else:
                body = self._lexical(node)
            lines.append(f"{self._names[node]}: {body}")
        return "\n".join([*lines, ""])

    def _expression(self, node: Node, follow: CharSet) -> str:
        """The part as the body of a rule, where `follow` may come after it."""
        if self._analysis.is_regular(node):
            lexeme = self._body(node)
            if lexeme not in self._cut:
                self.follows[lexeme] = union(self.follows.get(lexeme, ()), follow)
                return self._name("T", lexeme)
        if isinstance(node, Reference):
            return self._name("r", node)
        if isinstance(node, Token):
            return node.spelling
        parts = self._analysis.parts(node, follow)
        return _composed(node, [self._expression(part, after) for part, after in parts])

    def _lexical(self, node: Node) -> str:
        """The part as the body of a lexeme."""
        if isinstance(node, Reference):
            return self._name("T", self._body(node))
        if isinstance(node, Chars):
            return f"/[{''.join(map(_range, node.ranges))}]/"
        return _composed(node, [self._lexical(child) for child in children(node)])

    def _body(self, node: Node) -> Node:
        while isinstance(node, Reference):
            node = self._rules[node.name]
        return node

    def _name(self, kind: str, node: Node) -> str:
        if node not in self._names:
            self._names[node] = f"{kind}{len(self._names)}"
            self._to_write.append(node)
        return self._names[node]


def _composed(node: Node, parts: list[str]) -> str:
    """The node in Lark, of its parts in Lark."""
    match node:
        case Choice():
            return f"({' | '.join(parts)})"
        case Repeat(_, least, most):
            return f"({parts[0]}){{{least},{'' if most is None else most}}}"
        case _:
            return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or '""'


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
    """Glushkov's automaton of all lexemes: a state for each of their character sets ("position"), and one
    for the end of each, where the characters are those that can follow."""

    def __init__(
        self, rules: Mapping[str, Node], analysis: Analysis, follows: Mapping[Node, CharSet]
    ) -> None:
        self._rules = rules
        self._analysis = analysis
        self._chars: list[CharSet] = []
        self._next: dict[int, CharSet] = {}
        """the positions that may come after each but the ends"""
        self._owners: list[Node] = []
        self._firsts: CharSet = ()
        for lexeme, follow in follows.items():
            before, self._num_parts = len(self._chars), 0
            try:
                marked = self._marked(lexeme, 0)
            except _TooLarge:
                del self._chars[before:]
                continue
            end = ((len(self._chars), len(self._chars)),)
            self._chars.append(follow)
            self._owners += [lexeme] * (len(self._chars) - before)
            self._link(marked, end)
            self._firsts = union(self._firsts, analysis.first(marked, end))

    def _marked(self, node: Node, depth: int) -> Node:
        """The part with all references resolved and a position in place of each character set."""
        self._num_parts += 1
        is_large = len(self._chars) >= _MAX_POSITIONS or self._num_parts > _MAX_PARTS
        if is_large or depth > _MAX_REFERENCES:
            raise _TooLarge
        match node:
            case Chars(ranges):
                self._chars.append(ranges)
                return Chars(((len(self._chars) - 1, len(self._chars) - 1),))
            case Reference(name):
                return self._marked(self._rules[name], depth + 1)
            case Repeat(item, least, most) if most == least <= _UNROLLED:
                return Sequence(tuple(self._marked(item, depth) for _ in range(least)))
            case Repeat(item, least, most):
                return Repeat(self._marked(item, depth), least, most)
            case Choice(options):
                return Choice(tuple(self._marked(option, depth) for option in options))
            case _:  # no lexeme has tokens
                return Sequence(tuple(self._marked(child, depth) for child in children(node)))

    def _link(self, marked: Node, follow: CharSet) -> None:
        if isinstance(marked, Chars):
            self._next[marked.ranges[0][0]] = follow
        for part, after in self._analysis.parts(marked, follow):
            self._link(part, after)

    def too_greedy(self) -> set[Node]:
        greedy: set[Node] = set()
        open_states = [_members(self._firsts)]
        """by the positions that may be read next"""
        seen = set(open_states)
        while open_states and len(seen) <= _MAX_STATES:
            for read in self._steps(open_states.pop()):
                state = _members(union(*(self._next[i] for i in read)))
                follow = union(*(self._chars[i] for i in state if i not in self._next))
                inside = state & self._next.keys()
                greedy.update(self._owners[i] for i in inside if overlap(self._chars[i], follow))
                if state not in seen:
                    seen.add(state)
                    open_states.append(state)
        return greedy

    def _steps(self, state: frozenset[int]) -> set[frozenset[int]]:
        """Which positions are read together by one character."""
        positions = state & self._next.keys()
        edges = sorted({point for i in positions for a, b in self._chars[i] for point in (a, b + 1)})
        together = (frozenset(i for i in positions if overlap(self._chars[i], ((e, e),))) for e in edges)
        return {read for read in together if read}


def _members(positions: CharSet) -> frozenset[int]:
    return frozenset(i for first, last in positions for i in range(first, last + 1))
