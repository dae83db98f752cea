"""GBNF as Lark for llguidance: regular parts become lexemes wherever the longest match is right."""

from __future__ import annotations

from collections import deque

from outrider.constraints.gbnf.analysis import Analysis
from outrider.constraints.gbnf.lexemes import too_greedy
from outrider.constraints.gbnf.nodes import (
    Chars,
    CharSet,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Token,
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
        if not (greedy := too_greedy(rules, writer.follows)):
            return lark
        cut |= greedy


class _Writer:
    def __init__(self, rules: dict[str, Node], analysis: Analysis, cut: set[Node]) -> None:
        self.follows: dict[Node, CharSet] = {}
        """what can stand behind each lexeme"""
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
        """The part as the body of a rule, where `follow` may stand behind it."""
        if self._analysis.is_regular(node):
            lexeme = self._body(node)
            if lexeme not in self._cut:
                self.follows[lexeme] = union(self.follows.get(lexeme, ()), follow)
                return self._terminal(lexeme)
        match node:
            case Sequence(items):
                behind = [self._analysis.behind(items[i + 1 :], follow) for i in range(len(items))]
                return _joined(list(map(self._expression, items, behind)))
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
