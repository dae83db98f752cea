r"""GBNF, llama.cpp's grammar language, as Lark for llguidance.

llguidance's converter reads the grammar, but for characters: it writes escapes that Lark cannot read. Its
Lark is not used: it makes a lexeme of every regular rule. llguidance ends a lexeme only where no lexeme can
go on; GBNF takes every split of a text: with `root ::= a "a"` and `a ::= "a"+` the lexeme would take the last
"a". So regular parts become lexemes where that makes no difference, else rules over smaller parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    Position,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from outrider.constraints.tokenizer import NOTHING_FITS
from outrider.core.errors import GrammarError

_LAST_CODE_POINT = 0x10FFFF
_BYTES = LLTokenizer("byte")

Rules = Mapping[str, RuleNode]


@dataclass(frozen=True)
class Chars(ASTNode):
    """One character within the ranges of code points (both ends included), or outside them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def __str__(self) -> str:
        inside = "".join(f"\\U{first:08X}-\\U{last:08X}" for first, last in self.ranges)
        return f"/[{'^' * self.negated}{inside}]/" if inside else "/(?s:.)/"

    @property
    def is_ascii(self) -> bool:
        return not self.negated and all(last < 128 for _, last in self.ranges)


def gbnf_to_lark(text: str) -> str:
    """The grammar in Lark, which matches the same texts. Raises GrammarError."""
    try:
        rules = parse(text)
        analysis = _Analysis(rules)
        cut: set[str] = set()
        while True:
            writer = _Writer(rules, analysis, cut)
            lark = writer.write()
            greedy = writer.too_greedy()
            if not greedy:
                return lark
            cut |= greedy
    except RecursionError:
        raise _broken("it nests too many levels deep") from None


def _broken(why: str, way_out: str = "Correct it.") -> GrammarError:
    return GrammarError("grammar", why, way_out)


# Reading

_MAX_RULES = 1000
_MAX_REPETITIONS = 10_000
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_CHARACTER = r'(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt"\\\[\]])|[^\\])'
_RANGE = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_SINGLE = re.compile(f"({_CHARACTER})()", re.DOTALL)
_TEXT = re.compile(r'"(?P<text>(?:[^"\\\n]|\\.)*)"')
_SET = re.compile(r"\[(?P<negated>\^?)(?P<set>(?:[^\]\\\n]|\\.)*)\]")
_MARKED = re.compile(rf"{_TEXT.pattern}|{_SET.pattern}|#[^\r\n]*|(?P<any>\.)")


def parse(text: str) -> Rules:
    """The rules by their names; of two with one name the last counts, as in llama.cpp. Raises GrammarError,
    with the line, for what is no GBNF and for rules that do not exist."""
    # A dot is read otherwise by the converter: the reader below is handed a set.
    marked = _MARKED.sub(lambda found: "[^]" if found["any"] else found[0], text)
    try:
        rules = _Reader().parse(marked)
    except GbnfToLarkError as error:
        at, why = error.pos.pos, str(error).removesuffix(f" at {error.pos}")
        near = marked[at : at + 20].split("\n")[0]
        near = f" (at {near!r})" if near.strip() else ""
        line = marked.count("\n", 0, at) + 1
        raise _broken(f"line {line}: {why[:1].lower()}{why[1:]}{near}") from None
    except ValueError:  # of int()
        raise _broken("a number of repetitions is none") from None
    if len(rules) > _MAX_RULES:
        why = f"it has {len(rules):,} rules, {_MAX_RULES:,} are the most"
        raise _broken(why, "Leave out what the output does not need.")
    if "root" not in rules:
        raise _broken("it has no rule named root", "Add one: the text follows it.")
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
        for node in _all(rule.alternatives):
            _check(node, rules)
    return rules


def _all(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _all(child)


def _check(node: ASTNode, rules: Rules) -> None:
    match node:
        case RuleRefNode(name):
            if name not in rules:
                raise _broken(f"there is no rule named {name}", "Add it.")
            node.target = rules[name]
        case RepetitionNode(_, least, most):
            if max(least, most or 0) > _MAX_REPETITIONS:
                raise _broken(f"more than {_MAX_REPETITIONS:,} repetitions")
            if most is not None and most < least:
                raise _broken(f"at least {least} and at most {most} times cannot be")


class _Reader(GrammarParser):
    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        if (found := _TEXT.match(pos.text, pos.pos)) is None:
            raise GbnfToLarkError(pos, "A text has no end")
        chars: list[ASTNode] = [Chars((each,)) for each in _ranges(found["text"], _SINGLE, pos)]
        return SequenceNode(chars), Position(pos.text, found.end())

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        if (found := _SET.match(pos.text, pos.pos)) is None:
            raise GbnfToLarkError(pos, "A set of characters has no end")
        ranges, negated = tuple(_ranges(found["set"], _RANGE, pos)), bool(found["negated"])
        if not ranges and not negated:
            raise GbnfToLarkError(pos, "A set of characters is empty")
        if any(last < first for first, last in ranges):
            raise GbnfToLarkError(pos, "A range of characters runs backwards")
        return Chars(ranges, negated), Position(pos.text, found.end())


def _ranges(inside: str, pattern: re.Pattern[str], pos: Position) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(inside):
        if (found := pattern.match(inside, at)) is None:
            raise GbnfToLarkError(pos, f"{inside[at : at + 2]} is not an escape that GBNF knows")
        first, last = (_point(found[i] or found[1], pos) for i in (1, 2))
        yield first, last
        at = found.end()


def _point(character: str, pos: Position) -> int:
    if len(character) > 2:
        point = int(character[2:], 16)
        if point > _LAST_CODE_POINT or 0xD800 <= point <= 0xDFFF:
            raise GbnfToLarkError(pos, f"{character} is not a character")
        return point
    return ord(_ESCAPES.get(character[-1], character[-1]) if len(character) == 2 else character)


# What is known of the rules

_First = frozenset[Chars]
_Value = TypeVar("_Value")


class _Analysis:
    """Which parts may be empty, and which characters begin and follow parts: too many rather than too few."""

    def __init__(self, rules: Rules) -> None:
        while regular := [r for r in rules.values() if r.alternatives.is_terminal() > r.rule_is_terminal]:
            for rule in regular:
                rule.rule_is_terminal = True
        self._nullable = _least(rules, False, _is_nullable)
        self._firsts: Mapping[str, _First] = _least(rules, frozenset[Chars](), self._first)
        self.follows: dict[str, _First] = dict.fromkeys(rules, frozenset())
        before: dict[str, _First] = {}
        while before != self.follows:
            before = dict(self.follows)
            for name, rule in rules.items():
                self._propagate(rule.alternatives, self.follows[name])

    def parts(self, node: ASTNode, follow: _First) -> list[tuple[ASTNode, _First]]:
        """What the node is made of, each with what may come after it, given what may come after the node."""
        match node:
            case SequenceNode(items):
                backwards = []
                for item in reversed(items):
                    backwards.append((item, follow))
                    empty = _is_nullable(item, self._nullable)
                    follow = self._first(item, self._firsts) | (follow if empty else frozenset())
                return backwards[::-1]
            case RepetitionNode(item, _, most):
                return [(item, follow if most == 1 else self._first(item, self._firsts) | follow)]
            case _:
                return [(child, follow) for child in node.children()]

    def _first(self, node: ASTNode, known: Mapping[str, _First]) -> _First:
        match node:
            case Chars():
                return frozenset([node])
            case RuleRefNode(name):
                return known[name]
        found: _First = frozenset()
        for child in node.children():
            found |= self._first(child, known)
            if isinstance(node, SequenceNode) and not _is_nullable(child, self._nullable):
                break
        return found

    def _propagate(self, node: ASTNode, follow: _First) -> None:
        if isinstance(node, RuleRefNode):
            self.follows[node.name] |= follow
        for part, after in self.parts(node, follow):
            self._propagate(part, after)


def _least(
    rules: Rules, bottom: _Value, value: Callable[[ASTNode, Mapping[str, _Value]], _Value]
) -> dict[str, _Value]:
    """The least fixed point of `value`, which takes a node and the values of the rules. Grammars are mostly
    written from the top down, so it is gathered from the last rule on."""
    known = dict.fromkeys(rules, bottom)
    before: dict[str, _Value] = {}
    while before != known:
        before = dict(known)
        for name in reversed(known):
            known[name] = value(rules[name].alternatives, known)
    return known


def _is_nullable(node: ASTNode, known: Mapping[str, bool]) -> bool:
    match node:
        case RuleRefNode(name):
            return known[name]
        case AlternativeNode(options):
            return any(_is_nullable(option, known) for option in options)
        case RepetitionNode(item, least):
            return least == 0 or _is_nullable(item, known)
        case SequenceNode(items):
            return all(_is_nullable(item, known) for item in items)
        case _:
            return False


# Writing


class _Writer:
    """Writes all but the parts in `cut` as the largest lexemes. Rules are known by their names, lexemes and
    parts of them by their text."""

    def __init__(self, rules: Rules, analysis: _Analysis, cut: set[str]) -> None:
        self._rules = rules
        self._analysis = analysis
        self._cut = cut
        self._follows: dict[str, _First] = {}
        """the characters that can follow each lexeme"""
        self._nodes: dict[str, ASTNode] = {}
        self._names: dict[str, str] = {}
        """in Lark"""
        self._bodies: dict[str, str] = {}

    def write(self) -> str:
        start = self._expression(RuleRefNode("root", self._rules["root"]), frozenset())
        while waiting := [key for key in self._nodes if key not in self._bodies]:
            for key in waiting:
                if isinstance(self._nodes[key], RuleRefNode):
                    body = self._expression(self._rules[key].alternatives, self._analysis.follows[key])
                else:
                    body = self._lexical(self._nodes[key])
                self._bodies[key] = str(body)
        return f"start: {start}\n{self._lines(self._names)}"

    def _lines(self, keys: Iterable[str]) -> str:
        return "".join(f"{self._names[key]}: {self._bodies[key]}\n" for key in keys)

    def _expression(self, node: ASTNode, follow: _First) -> ASTNode:
        if node.is_terminal() and (key := str(self._resolved(node))) not in self._cut:
            self._follows[key] = self._follows.get(key, frozenset()) | follow
            return self._lexeme(node)
        if isinstance(node, RuleRefNode):
            return self._named("r", node.name, node)
        parts = self._analysis.parts(node, follow)
        return _rebuilt(node, [self._expression(part, after) for part, after in parts])

    def _lexical(self, node: ASTNode) -> ASTNode:
        if isinstance(node, RuleRefNode):
            return self._lexeme(node)
        return _rebuilt(node, [self._lexical(child) for child in node.children()])

    def _lexeme(self, node: ASTNode) -> ASTNode:
        lexeme = self._resolved(node)
        return self._named("T", str(lexeme), lexeme)

    def _resolved(self, node: ASTNode) -> ASTNode:
        while isinstance(node, RuleRefNode):
            node = self._rules[node.name].alternatives
        return node

    def _named(self, kind: str, key: str, node: ASTNode) -> ASTNode:
        self._nodes[key] = node
        return RuleRefNode(self._names.setdefault(key, f"{kind}{len(self._names)}"))

    def too_greedy(self) -> set[str]:
        """The lexemes that would take text that belongs after themselves, or after another that ends there.
        A single character takes nothing too much."""
        suspects = [key for key in self._follows if not isinstance(self._nodes[key], Chars)]
        ended = [
            f"({self._names[key]} & NOTEMPTY) /{_any_of(follow)}/"
            for key, follow in self._follows.items()
            if follow
        ]
        if not ended:
            return set()
        lexical = self._lines(key for key, node in self._nodes.items() if not isinstance(node, RuleRefNode))
        common = f"{lexical}NOTEMPTY: /(?s:.+)/\nENDED: ({' | '.join(ended)}) /(?s:.*)/\n"
        return set(self._greedy(common, suspects))

    def _greedy(self, common: str, suspects: list[str]) -> list[str]:
        """Those of the suspects that go on where a lexeme may end, found by halves."""
        if not suspects:
            return []
        names = " | ".join(self._names[key] for key in suspects)
        if not _matches_something(f"start: BOTH\nBOTH: ENDED & ({names})\n{common}"):
            return []
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        return self._greedy(common, suspects[:half]) + self._greedy(common, suspects[half:])


def _rebuilt(node: ASTNode, parts: list[ASTNode]) -> ASTNode:
    match node:
        case SequenceNode():
            return SequenceNode(parts)
        case AlternativeNode():
            return AlternativeNode(parts)
        case RepetitionNode(_, least, most):
            # In a sequence of its own it gets parentheses, which a repetition of repetitions needs.
            return RepetitionNode(SequenceNode(parts), least, most)
        case _:
            return node


def _any_of(characters: _First) -> str:
    """A character that begins like one of these: llguidance reads bytes."""
    ranges = {str(characters).strip("/") for characters in characters}
    if not all(characters.is_ascii for characters in characters):
        ranges.add(r"[^\x00-\x7F]")
    return f"({'|'.join(sorted(ranges))})"


def _matches_something(lark: str) -> bool:
    """Whether any text follows the grammar. What is too large to be told counts as one that does."""
    matcher = LLMatcher(_BYTES, lark, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not (matcher.is_error() and NOTHING_FITS in matcher.get_error())
