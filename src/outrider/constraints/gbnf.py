r"""GBNF, llama.cpp's grammar language, as Lark for llguidance.

llguidance ends a lexeme only where no lexeme can go on; GBNF takes every split of a text. So regular parts
become lexemes where that makes no difference, and rules over smaller parts where it does. (The converter that
comes with llguidance makes a lexeme of every regular rule, which loses texts: with `root ::= a "a"` and
`a ::= "a"+` the lexeme takes the last "a". Nor does it know tokens, or write \u escapes that Lark can read.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.constraints.complaints import NOTHING_FITS
from outrider.core.errors import GrammarError

_LAST_CODE_POINT = 0x10FFFF
_BYTES = LLTokenizer("byte")


@dataclass(frozen=True, slots=True)
class Chars:
    """One character within the ranges of code points (both ends included), or outside them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    @property
    def regex(self) -> str:
        inside = "".join(f"\\U{first:08X}-\\U{last:08X}" for first, last in self.ranges)
        if not inside:
            return "(?s:.)"
        return f"[{'^' * self.negated}{inside}]"

    @property
    def is_ascii(self) -> bool:
        return not self.negated and all(last < 128 for _, last in self.ranges)


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


def gbnf_to_lark(text: str) -> str:
    """The grammar in Lark, which matches the same texts. Raises GrammarError."""
    rules = parse(text)
    analysis = _Analysis(rules)
    cut: set[Node] = set()
    while True:
        writer = _Writer(rules, analysis, cut)
        lark = writer.write()
        greedy = writer.too_greedy()
        if not greedy:
            return lark
        cut |= greedy


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(items) | Choice(items):
            return items
        case Repeat(item):
            return (item,)
        case _:
            return ()


# Reading

_MAX_NESTING = 100
_MAX_RULES = 1000
_MAX_REPETITIONS = 10_000
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_CHARACTER = r'(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt"\\\[\]])|[^\\])'
_RANGE = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_SINGLE = re.compile(f"({_CHARACTER})()", re.DOTALL)
_BLANK, _LINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME, _DEFINED, _OR, _CLOSED = map(re.compile, ("[A-Za-z0-9_-]+", "::=", r"\|", r"\)"))
_ITEM = re.compile(
    rf'(?P<name>{_NAME.pattern})|"(?P<literal>(?:[^"\\\n]|\\.)*)"|\[(?P<set>(?:[^\]\\\n]|\\.)*)\]'
    r"|(?P<token><(?:\[\d+\]|[^<>\[\]\s][^<>\s]*)>)|(?P<any>\.)|(?P<group>\()"
)
_TIMES = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_UNREADABLE = {
    '"': "a text has no end",
    "[": "a set of characters has no end",
    "<": "a token, such as <think> or <[1000]>, is expected here",
    "!": "tokens cannot be excluded",
}


def parse(text: str) -> dict[str, Node]:
    """The rules by their names. Raises GrammarError, with the line, for what is no GBNF and for rules
    that do not exist."""
    parser = _Parser(text)
    rules = parser.rules()
    if len(rules) > _MAX_RULES:
        why = f"it has {len(rules):,} rules, {_MAX_RULES:,} are the most"
        raise GrammarError("grammar", why, "Leave out what the output does not need.")
    if "root" not in rules:
        raise GrammarError("grammar", "it has no rule named root", "Add one: the text follows it.")
    for name, line in parser.references.items():
        if name not in rules:
            why = f"line {line}: there is no rule named {name}"
            raise GrammarError("grammar", why, "Add it.")
    return rules


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.references: dict[str, int] = {}
        """the names of rules, and the line where each is first used"""

    def _error(self, why: str, at: int) -> GrammarError:
        near = self._text[at : at + 20].split("\n")[0]
        near = f" (at {near!r})" if near.strip() else ""
        return GrammarError("grammar", f"line {self._line(at)}: {why}{near}", "Correct it.")

    def _line(self, at: int) -> int:
        return self._text.count("\n", 0, at) + 1

    def _skip(self, *, lines: bool = False) -> None:
        """Pass over blanks and comments; in groups also over the ends of lines, which else end a rule."""
        found = (_LINES if lines or self._depth else _BLANK).match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What comes next, if it is that."""
        self._skip()
        if found := pattern.match(self._text, self._at):
            self._at = found.end()
        return found

    def _expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        if (found := self._take(pattern)) is None:
            why = _UNREADABLE.get(self._text[self._at : self._at + 1], f"{what} is expected here")
            raise self._error(why, self._at)
        return found

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._expect(_NAME, "the name of a rule")
            if name[0] in rules:
                raise self._error(f"there are two rules named {name[0]}", name.start())
            self._expect(_DEFINED, "::=")
            self._skip(lines=True)
            rules[name[0]] = self._choice()
            self._skip()
            if (found := self._text[self._at : self._at + 1]) not in ("", "\r", "\n"):
                raise self._error(_UNREADABLE.get(found, f"{found!r} is not expected here"), self._at)
            self._skip(lines=True)
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take(_OR):
            self._skip(lines=True)
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while found := self._take(_ITEM):
            item = self._item(found)
            while times := self._take(_TIMES):
                item = Repeat(item, *self._times(times))
            items.append(item)
        return _sequence(items)

    def _item(self, found: re.Match[str]) -> Node:
        match found.lastgroup:
            case "name":
                self.references.setdefault(found[0], self._line(found.start()))
                return Reference(found[0])
            case "literal":
                return _sequence(
                    [Chars((point,)) for point in self._ranges(found, found["literal"], _SINGLE)]
                )
            case "set":
                return self._chars(found)
            case "token":
                return Token(found[0])
            case "any":
                return Chars((), negated=True)
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error(f"it nests more than {_MAX_NESTING} levels deep", found.start())
        inner = self._choice()
        self._expect(_CLOSED, ")")
        self._depth -= 1
        return inner

    def _chars(self, found: re.Match[str]) -> Chars:
        negated = found["set"].startswith("^")
        ranges = tuple(self._ranges(found, found["set"].removeprefix("^"), _RANGE))
        if not ranges and not negated:
            raise self._error("a set of characters is empty", found.start())
        if any(last < first for first, last in ranges):
            raise self._error("a range of characters runs backwards", found.start())
        return Chars(ranges, negated)

    def _ranges(
        self, word: re.Match[str], inside: str, pattern: re.Pattern[str]
    ) -> Iterator[tuple[int, int]]:
        """The characters in a text or set, each as a range."""
        at = 0
        while at < len(inside):
            found = pattern.match(inside, at)
            if found is None:
                raise self._error(f"{inside[at : at + 2]} is not an escape that GBNF knows", word.start())
            first, last = (self._point(word, found[i] or found[1]) for i in (1, 2))
            yield first, last
            at = found.end()

    def _point(self, word: re.Match[str], character: str) -> int:
        if len(character) > 2:
            point = int(character[2:], 16)
            if point > _LAST_CODE_POINT or 0xD800 <= point <= 0xDFFF:
                raise self._error(f"{character} is not a character", word.start())
            return point
        return ord(_ESCAPES.get(character[-1], character[-1]) if len(character) == 2 else character)

    def _times(self, word: re.Match[str]) -> tuple[int, int | None]:
        """At least and at most how often."""
        if word[0] in _SIGNS:
            return _SIGNS[word[0]]
        numbers = [word[1], word[1] if word["most"] is None else word["most"]]
        if any(len(number) > 10 or int(number or 0) > _MAX_REPETITIONS for number in numbers):
            raise self._error(f"more than {_MAX_REPETITIONS:,} repetitions", word.start())
        least, most = (int(number) if number else None for number in numbers)
        assert least is not None, "the pattern demands it"
        if most is not None and most < least:
            raise self._error(f"at least {least} and at most {most} times cannot be", word.start())
        return least, most


def _sequence(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Sequence(tuple(items))


# What is known of the rules

_First = frozenset[Chars]
_Value = TypeVar("_Value")


class _Analysis:
    """Which characters begin and follow parts (too many rather than too few), and which parts may be empty.
    Raises GrammarError for a rule that no finite text follows."""

    def __init__(self, rules: dict[str, Node]) -> None:
        for name, complete in _least(rules, False, partial(_completes, empty=False)).items():
            if not complete:
                why = f"the rule {name} can never be complete: it always leads to itself"
                raise GrammarError("grammar", why, "Give it a way out.")
        self._regular = _least(rules, False, _is_regular)
        self._nullable = _least(rules, False, partial(_completes, empty=True))
        self._firsts: Mapping[str, _First] = _least(rules, frozenset[Chars](), self._first)
        self.follows: dict[str, _First] = dict.fromkeys(rules, frozenset())
        before: dict[str, _First] = {}
        while before != self.follows:
            before = dict(self.follows)
            for name, node in rules.items():
                self._propagate(node, self.follows[name])

    def is_regular(self, node: Node) -> bool:
        """Whether the part is a regular expression: no rule in it leads back to itself."""
        return _is_regular(node, self._regular)

    def parts(self, node: Node, follow: _First) -> list[tuple[Node, _First]]:
        """What the node is made of, each with what may come after it, given what may come after the node."""
        match node:
            case Sequence(items):
                backwards = []
                for item in reversed(items):
                    backwards.append((item, follow))
                    empty = _completes(item, self._nullable, empty=True)
                    follow = self._first(item, self._firsts) | (follow if empty else frozenset())
                return backwards[::-1]
            case Repeat(item, _, most):
                return [(item, follow if most == 1 else self._first(item, self._firsts) | follow)]
            case _:
                return [(child, follow) for child in _children(node)]

    def _first(self, node: Node, known: Mapping[str, _First]) -> _First:
        match node:
            case Chars():
                return frozenset([node])
            case Reference(name):
                return known[name]
        found: _First = frozenset()
        for child in _children(node):
            found |= self._first(child, known)
            if isinstance(node, Sequence) and not _completes(child, self._nullable, empty=True):
                break
        return found

    def _propagate(self, node: Node, follow: _First) -> None:
        if isinstance(node, Reference):
            self.follows[node.name] |= follow
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
    return not isinstance(node, Token) and all(_is_regular(child, regular) for child in _children(node))


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


# Writing


class _Writer:
    """Writes all but the parts in `cut` as the largest lexemes."""

    def __init__(self, rules: Mapping[str, Node], analysis: _Analysis, cut: set[Node]) -> None:
        self._rules = rules
        self._analysis = analysis
        self._cut = cut
        self._follows: dict[Node, _First] = {}
        """the characters that can follow each lexeme"""
        self._names: dict[Node, str] = {}
        """of rules (by their references) and of lexemes and parts of them"""
        self._bodies: dict[Node, str] = {}

    def write(self) -> str:
        start = self._expression(Reference("root"), frozenset())
        while waiting := [node for node in self._names if node not in self._bodies]:
            for node in waiting:
                if isinstance(node, Reference):
                    follow = self._analysis.follows[node.name]
                    self._bodies[node] = self._expression(self._rules[node.name], follow)
                else:
                    self._bodies[node] = self._lexical(node)
        return f"start: {start}\n{self._lines(self._names)}"

    def _lines(self, nodes: Iterable[Node]) -> str:
        return "".join(f"{self._names[node]}: {self._bodies[node]}\n" for node in nodes)

    def _expression(self, node: Node, follow: _First) -> str:
        """The part as the body of a rule, where `follow` may come after it."""
        if self._analysis.is_regular(node):
            lexeme = self._resolved(node)
            if lexeme not in self._cut:
                self._follows[lexeme] = self._follows.get(lexeme, frozenset()) | follow
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
            return self._name("T", self._resolved(node))
        if isinstance(node, Chars):
            return f"/{node.regex}/"
        return _composed(node, [self._lexical(child) for child in _children(node)])

    def _resolved(self, node: Node) -> Node:
        while isinstance(node, Reference):
            node = self._rules[node.name]
        return node

    def _name(self, kind: str, node: Node) -> str:
        return self._names.setdefault(node, f"{kind}{len(self._names)}")

    def too_greedy(self) -> set[Node]:
        """The lexemes that would take text that belongs after themselves, or after another that ends there.
        A single character takes nothing too much."""
        suspects: list[Node] = [node for node in self._follows if not isinstance(node, Chars)]
        ended = [
            f"({self._names[node]} & NOTEMPTY) /{_any_of(follow)}/"
            for node, follow in self._follows.items()
            if follow
        ]
        if not ended:
            return set()
        lexical = self._lines(node for node in self._names if not isinstance(node, Reference))
        common = f"{lexical}NOTEMPTY: /(?s:.+)/\nENDED: ({' | '.join(ended)}) /(?s:.*)/\n"
        return set(self._greedy(common, suspects))

    def _greedy(self, common: str, suspects: list[Node]) -> list[Node]:
        """Those of the suspects that go on where a lexeme may end, found by halves."""
        if not suspects:
            return []
        names = " | ".join(self._names[node] for node in suspects)
        if not _matches_something(f"start: BOTH\nBOTH: ENDED & ({names})\n{common}"):
            return []
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        return self._greedy(common, suspects[:half]) + self._greedy(common, suspects[half:])


def _composed(node: Node, parts: list[str]) -> str:
    """The node in Lark, of its parts in Lark."""
    match node:
        case Choice():
            return f"({' | '.join(parts)})"
        case Repeat(_, least, most):
            return f"({parts[0]}){{{least},{'' if most is None else most}}}"
        case _:
            return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts) or '""'


def _any_of(characters: _First) -> str:
    """A character that begins like one of these: llguidance reads bytes, so that one beyond ASCII may begin
    like any other."""
    ranges = {characters.regex for characters in characters}
    if not all(characters.is_ascii for characters in characters):
        ranges.add(r"[^\x00-\x7F]")
    return f"({'|'.join(sorted(ranges))})"


def _matches_something(lark: str) -> bool:
    """Whether any text follows the grammar. What is too large to be told counts as one that does."""
    matcher = LLMatcher(_BYTES, lark, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not (matcher.is_error() and NOTHING_FITS in matcher.get_error())
