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
from typing import NamedTuple, TypeVar

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
_SINGLE = re.compile(f"({_CHARACTER})", re.DOTALL)
_SCANNED = re.compile(
    r"(?P<blank>[ \t]+|#[^\r\n]*)|(?P<line>[\r\n]+)|(?P<name>[A-Za-z0-9_-]+)|(?P<sign>::=|[|().])"
    r'|(?P<literal>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\\n]|\\.)*\])'
    r"|(?P<token><(?:\[\d+\]|[^<>\[\]\s][^<>\s]*)>)"
    r"|(?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})"
)
_UNREADABLE = {
    '"': "a text has no end",
    "[": "a set of characters has no end",
    "<": "a token, such as <think> or <[1000]>, is expected here",
    "!": "tokens cannot be excluded",
}
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Word(NamedTuple):
    kind: str
    """a group of `_SCANNED`, "end", or of a sign the sign itself"""
    text: str
    line: int

    def error(self, why: str) -> GrammarError:
        near = f" (at {self.text[:20]!r})" if self.text.strip() else ""
        return GrammarError("grammar", f"line {self.line}: {why}{near}", "Correct it.")


def parse(text: str) -> dict[str, Node]:
    """The rules by their names. Raises GrammarError, with the line, for what is no GBNF and for rules
    that do not exist."""
    parser = _Parser(list(_words(text)))
    rules = parser.rules()
    if len(rules) > _MAX_RULES:
        why = f"it has {len(rules):,} rules, {_MAX_RULES:,} are the most"
        raise GrammarError("grammar", why, "Leave out what the output does not need.")
    if "root" not in rules:
        raise GrammarError("grammar", "it has no rule named root", "Add one: the text follows it.")
    for word in parser.references:
        if word.text not in rules:
            why = f"line {word.line}: there is no rule named {word.text}"
            raise GrammarError("grammar", why, "Add it.")
    return rules


def _words(text: str) -> Iterator[_Word]:
    """The words, and the ends of lines only where they may end a rule."""
    at, line, depth, last = 0, 1, 0, "line"
    while at < len(text):
        found = _SCANNED.match(text, at)
        if found is None:
            rest = _Word("", text[at:].split("\n")[0], line)
            raise rest.error(_UNREADABLE.get(text[at], "this is not expected here"))
        kind = found[0] if found.lastgroup == "sign" else str(found.lastgroup)
        word = _Word(kind, found[0], line)
        at, line = found.end(), line + found[0].count("\n")
        depth += (kind == "(") - (kind == ")")
        if kind == "blank" or (kind == "line" and (depth > 0 or last in ("::=", "|", "line"))):
            continue
        last = kind
        yield word
    yield _Word("end", "", line)


class _Parser:
    def __init__(self, words: list[_Word]) -> None:
        self._words = words
        self._at = 0
        self._depth = 0
        self.references: list[_Word] = []

    @property
    def _next(self) -> _Word:
        return self._words[self._at]

    def _take(self, *expected: str) -> _Word | None:
        """The next word, if it is of one of these kinds."""
        word = self._next
        if word.kind not in expected:
            return None
        self._at += 1
        return word

    def _expect(self, expected: str, what: str) -> _Word:
        if (word := self._take(expected)) is None:
            raise self._next.error(f"{what} is expected here")
        return word

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while not self._take("end"):
            name = self._expect("name", "the name of a rule")
            if name.text in rules:
                raise name.error(f"there are two rules named {name.text}")
            self._expect("::=", "::=")
            rules[name.text] = self._choice()
            if self._next.kind not in ("line", "end"):
                raise self._next.error(f"{self._next.text!r} is not expected here")
            self._take("line")
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while word := self._take("name", "literal", "set", "token", ".", "("):
            item = self._item(word)
            while times := self._take("times"):
                item = Repeat(item, *_times(times))
            items.append(item)
        return _sequence(items)

    def _item(self, word: _Word) -> Node:
        match word.kind:
            case "name":
                self.references.append(word)
                return Reference(word.text)
            case "literal":
                return _sequence([Chars((point,)) for point in _ranges(word, word.text[1:-1], spans=False)])
            case "set":
                return _char_class(word)
            case "token":
                return Token(word.text)
            case ".":
                return Chars((), negated=True)
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise word.error(f"it nests more than {_MAX_NESTING} levels deep")
        inner = self._choice()
        self._expect(")", ")")
        self._depth -= 1
        return inner


def _sequence(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def _char_class(word: _Word) -> Chars:
    inside = word.text[1:-1]
    negated = inside.startswith("^")
    ranges = tuple(_ranges(word, inside.removeprefix("^"), spans=True))
    if not ranges and not negated:
        raise word.error("a set of characters is empty")
    if any(last < first for first, last in ranges):
        raise word.error("a range of characters runs backwards")
    return Chars(ranges, negated)


def _ranges(word: _Word, inside: str, *, spans: bool) -> Iterator[tuple[int, int]]:
    """The characters in a text or set, each as a range; with `spans`, "a-z" is one."""
    pattern = _RANGE if spans else _SINGLE
    at = 0
    while at < len(inside):
        found = pattern.match(inside, at)
        if found is None:
            raise word.error(f"{inside[at : at + 2]} is no escape that GBNF knows")
        first = _point(word, found[1])
        yield first, _point(word, found[2]) if spans and found[2] else first
        at = found.end()


def _point(word: _Word, character: str) -> int:
    if len(character) > 2:
        point = int(character[2:], 16)
        if point > _LAST_CODE_POINT or 0xD800 <= point <= 0xDFFF:
            raise word.error(f"{character} is no character")
        return point
    return ord(_ESCAPES.get(character[-1], character[-1]) if len(character) == 2 else character)


def _times(word: _Word) -> tuple[int, int | None]:
    """At least and at most how often."""
    if word.text in _SIGNS:
        return _SIGNS[word.text]
    numbers = [number.strip() for number in word.text[1:-1].split(",")]
    if any(len(number) > 10 or int(number or 0) > _MAX_REPETITIONS for number in numbers):
        raise word.error(f"more than {_MAX_REPETITIONS:,} repetitions")
    least = int(numbers[0])
    most = int(numbers[-1]) if numbers[-1] else None
    if most is not None and most < least:
        raise word.error(f"at least {least} and at most {most} times cannot be")
    return least, most


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
