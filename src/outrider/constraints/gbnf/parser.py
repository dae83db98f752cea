"""GBNF, llama.cpp's grammar language, read into rules."""

from __future__ import annotations

import re

from outrider.constraints.gbnf.rules import (
    LAST_CODE_POINT,
    Chars,
    CharSet,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Token,
    complement,
)
from outrider.core.errors import GrammarError

_MAX_NESTING = 100
_MAX_RULES = 1000
_MAX_REPETITIONS = 10_000
_MAX_DIGITS = 10
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_REPETITION = re.compile(r"[*+?]|\{\s*(\d+)\s*(,\s*(\d*)\s*)?\}")
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_TOKEN = re.compile(r"<(?:\[\d+\]|[^<>\[\]\s][^<>\s]*)>")
_ANY: CharSet = ((0, LAST_CODE_POINT),)


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
    for name, line in parser.references:
        if name not in rules:
            raise GrammarError("grammar", f"line {line}: there is no rule named {name}", "Add it.")
    return rules


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.references: list[tuple[str, int]] = []

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            name = self._take(_NAME, "the name of a rule")
            if name in rules:
                raise self._error(f"there are two rules named {name}")
            self._skip(_BLANKS)
            self._expect("::=")
            self._skip(_BLANKS_AND_LINES)
            rules[name] = self._choice()
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._error(f"{self._peek()!r} is not expected here")
            self._skip(_BLANKS_AND_LINES)
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._accept("|"):
            self._skip(_BLANKS_AND_LINES)
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        blanks = _BLANKS_AND_LINES if self._depth else _BLANKS
        items: list[Node] = []
        while (item := self._item()) is not None:
            self._skip(blanks)
            while (found := _REPETITION.match(self._text, self._at)) is not None:
                item = Repeat(item, *self._times(found))
                self._at = found.end()
                self._skip(blanks)
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node | None:
        if self._accept('"'):
            return self._literal()
        if self._accept("["):
            return self._char_class()
        if self._accept("."):
            return Chars(_ANY)
        match self._peek():
            case "(":
                return self._group()
            case "<":
                return Token(self._take(_TOKEN, "a token, such as <think> or <[1000]>"))
            case "!":
                raise self._error("tokens cannot be excluded")
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self.references.append((found[0], self._line()))
        self._at = found.end()
        return Reference(found[0])

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error(f"it nests more than {_MAX_NESTING} levels deep")
        self._expect("(")
        self._skip(_BLANKS_AND_LINES)
        inner = self._choice()
        self._expect(")")
        self._depth -= 1
        return inner

    def _literal(self) -> Node:
        characters: list[Node] = []
        while not self._accept('"'):
            point = self._character()
            characters.append(Chars(((point, point),)))
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def _char_class(self) -> Node:
        negated = self._accept("^")
        ranges: list[tuple[int, int]] = []
        while not self._accept("]"):
            first = last = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._character()
            if last < first:
                raise self._error("a range of characters runs backwards")
            ranges.append((first, last))
        if not ranges and not negated:
            raise self._error("a set of characters is empty")
        return Chars(complement(tuple(ranges)) if negated else tuple(ranges))

    def _character(self) -> int:
        character = self._peek()
        if character in ("", "\n"):
            raise self._error("a text or a set of characters has no end")
        self._at += 1
        if character != "\\":
            return ord(character)
        escape = self._peek()
        self._at += 1
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        digits = self._text[self._at : self._at + _HEX_DIGITS.get(escape, 0)]
        if not re.fullmatch(r"[0-9a-fA-F]+", digits) or len(digits) < _HEX_DIGITS[escape]:
            raise self._error(f"\\{escape} is no escape that GBNF knows")
        self._at += len(digits)
        if (point := int(digits, 16)) > LAST_CODE_POINT or 0xD800 <= point <= 0xDFFF:
            raise self._error(f"\\{escape}{digits} is no character")
        return point

    def _times(self, found: re.Match[str]) -> tuple[int, int | None]:
        """At least and at most how often."""
        if found[0] in _SIGNS:
            return _SIGNS[found[0]]
        if max(map(len, (found[1], found[3] or ""))) > _MAX_DIGITS:
            raise self._error(f"more than {_MAX_REPETITIONS:,} repetitions")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if max(least, most or 0) > _MAX_REPETITIONS:
            raise self._error(f"more than {_MAX_REPETITIONS:,} repetitions")
        if most is not None and most < least:
            raise self._error(f"at least {least} and at most {most} times cannot be")
        return least, most

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        found = blanks.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _take(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"{what} is expected here")
        self._at = found.end()
        return found[0]

    def _accept(self, sign: str) -> bool:
        """Whether the sign comes next, which is then read."""
        found = self._text.startswith(sign, self._at)
        self._at += len(sign) if found else 0
        return found

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._error(f"{sign} is expected here")

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, why: str) -> GrammarError:
        near = self._text[self._at : self._at + 20].split("\n")[0]
        near = f" (at {near!r})" if near else ""
        return GrammarError("grammar", f"line {self._line()}: {why}{near}", "Correct it.")
