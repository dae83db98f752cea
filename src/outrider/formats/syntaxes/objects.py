"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import NUMBER, Rules, repeated
from outrider.formats.reader import Reader
from outrider.formats.scan import BLANKS, Refused, Scan, blank, either, expect, literal, one_of, skip, value
from outrider.formats.scan import string as quoted
from outrider.formats.syntaxes.base import PROBE, CallSyntax, as_json

_KEYS = ("name", "tool_name", "arguments", "parameters", "type", "id")
_NAME = string.ascii_letters + string.digits + "_-."
_TO_THE_NAME = r'/((?s:.*)\n)?[ \t]*\{\s*"name"\s*:\s*/'


@dataclass(frozen=True, kw_only=True)
class Objects(CallSyntax):
    """JSON objects, between `opener` and `closer`: `begin` comes before the first, `comma` between two,
    `end` after the last. An object begins with `head`, the name and, under `key`, the arguments.

    `is_bare`: in an answer that may call tools, but need not, a line that begins with an object whose first
    key is the name of a tool is a call without markers (some models leave them out); so is what follows
    `tag`. Templates have all the `signs` of one of the rows in their source.
    """

    begin: str = ""
    comma: str = ", "
    end: str = ""
    head: str = '{"name": '
    key: str = "arguments"
    is_bare: bool = False
    tag: str = ""
    signs: tuple[tuple[str, ...], ...] = ((),)

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.opener, self.tag) if text)

    def is_of(self, source: str, rendered: str) -> bool:
        if PROBE.name not in rendered:
            return super().is_of(source, rendered)
        begins = "".join(f"{self.opener}{self.begin}{{".split()) in "".join(rendered.split())
        is_signed = any(all(sign in source for sign in row) for row in self.signs)
        return begins and is_signed and _writes_json(rendered)

    def written(self, calls: Sequence[Call]) -> str:
        texts = self.comma.join(self._inside(one, i) for i, one in enumerate(calls))
        return f"{self.opener}{self.begin}{texts}{self.end}{self.closer}"

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        found = []
        if free and self.is_bare:
            following = f"{json.dumps(self.separator or self.comma)} {self._choice(rules, tools)}"
            found = [repeated(self._bare(rules, tool), following, max_calls) for tool in tools]
        opener = self.opener or (self.tag if free else "")
        if opener or not free:
            one = self._choice(rules, tools)
            parts = (opener and rules.opener(opener, free=free), rules.marker(self.begin), one)
            several = repeated(" ".join(filter(None, parts)), f"{rules.marker(self.comma)} {one}", max_calls)
            found.append(f"{several} {rules.marker(self.end + self.closer)}")
        return found

    def scan_from(self, first: str, reader: Reader) -> Scan[None] | None:
        is_bare = self.is_bare and reader.is_line_start and first == "{"
        return self._scan_bare(reader) if is_bare else super().scan_from(first, reader)

    def scan(self, first: str, reader: Reader) -> Scan[None]:
        closer = (self.closer,) if self.is_bare and self.closer and reader.is_after_call else ()
        if (yield from either([*self.openers, *closer], first)) == len(self.openers):
            reader.drop()
        else:
            reader.certain()
            yield from self._scan_call(reader)

    def _scan_call(self, reader: Reader) -> Scan[None]:
        yield from self._scan_objects(reader, (yield from blank()))

    def _scan_objects(self, reader: Reader, character: str) -> Scan[None]:
        is_list = character == "["
        if is_list:
            character = yield from blank()
        character = yield from _each(reader, character, None)
        if is_list:
            expect(character == "]")
            character = ""
        yield from either([self.closer], character)
        reader.drop()

    def _scan_bare(self, reader: Reader) -> Scan[None]:
        yield from _each(reader, "{", reader.tools)
        raise Refused  # what comes after them is read anew

    def _inside(self, call: Call, index: int) -> str:
        name, arguments = map(as_json, call)
        return f'{self.head.replace(NUMBER, str(index))}{name}, "{self.key}": {arguments}}}'

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        name = as_json(tool.name)
        if self.opener:
            between = json.dumps(f'{name}, "{self.key}": ')
            return f'{rules.marker(self.head)} {between} {rules.arguments(tool)} "}}"'
        # Other JSON may be allowed in its place, which llguidance tells apart after lexemes that are alike.
        head = map(json.dumps, ("{", '"name"', ": ", name, ", ", f'"{self.key}"', ": "))
        return f'{" ".join(head)} {rules.arguments(tool)} "}}"'

    def _choice(self, rules: Rules, tools: Sequence[ToolSpec]) -> str:
        return rules.choice([self._rule(rules, tool) for tool in tools])

    def _bare(self, rules: Rules, tool: ToolSpec) -> str:
        """Free text that goes over into a call."""
        prefix = rules.text_up_to(_TO_THE_NAME, as_json(tool.name))
        between = json.dumps(f', "{self.key}": ')
        return f'{prefix} {between} {rules.arguments(tool)} "}}"'


@dataclass(frozen=True, kw_only=True)
class Mistral(Objects):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    Both are read, whatever the template writes; it decides which is demanded, by the `marks` in its source.
    """

    name: str = "mistral"
    opener: str = "[TOOL_CALLS]"
    begin: str = "["
    end: str = "]"
    marks: tuple[str, ...] = ()

    def is_of(self, source: str, rendered: str) -> bool:
        return _writes_json(rendered) and all(mark in source for mark in (self.opener, *self.marks))

    def written(self, calls: Sequence[Call]) -> str:
        if not self.marks:
            return super().written(calls)
        between = "probe1234".join(self.marks)
        return "".join(f"{self.opener}{one.name}{between}{as_json(one.arguments)}" for one in calls)

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        first, opener = rules.opener(self.opener, free=free), rules.marker(self.opener)
        if self.marks:
            *ids, arguments = map(rules.marker, self.marks)
            between = " ".join([*(f"({mark} /[a-zA-Z0-9]{{9}}/)?" for mark in ids), arguments])
            one = rules.choice([f"{json.dumps(t.name)} {between} {rules.arguments(t)}" for t in tools])
            return [repeated(f"{first} {one}", f"{opener} {one}", max_calls)]
        one = self._choice(rules, tools)
        # Tokenizers of the older models put a blank after the marker.
        several = repeated(one, f'", " {one}', max_calls)
        return [f'{first} (" ")? "[" {several} "]"']

    def _scan_call(self, reader: Reader) -> Scan[None]:
        if (character := (yield from blank())) in "[{":
            yield from self._scan_objects(reader, character)
            return
        name = ""
        while character in _NAME:
            name += character
            character = yield
        if character == "[" and (yield from one_of(("ARGS", "CALL_ID"), "]")) == "CALL_ID":
            while (yield) != "[":
                pass
            yield from literal("ARGS]")
        reader.name(name)
        if character == "[" or character.isspace():
            character = yield from blank()
        expect(character == "{")
        yield from value(character, reader.arguments)
        reader.close()


def _writes_json(rendered: str) -> bool:
    """Whether the probe was written with its arguments in JSON; white space and the order of keys differ."""
    return PROBE.name in rendered and all(f'"{key}"' in rendered for key in PROBE.arguments)


def _each(reader: Reader, character: str, names: Collection[str] | None) -> Scan[str]:
    """Calls one after another from that character on, and the first one after them."""
    while character == "{":
        yield from _call(reader, names)
        if (character := (yield from blank())) in ",;":
            character = yield from blank()
            expect(character == "{")
    return character


def _call(reader: Reader, names: Collection[str] | None) -> Scan[None]:
    """An object with a name and arguments, after its opening brace. With `names` it has one of these,
    and no other keys than calls have, so that other objects are refused as soon as they differ."""
    known = _KEYS if names is not None else None
    is_given = False
    character = yield from blank()
    while character == '"':
        key = yield from _text(known)
        expect((yield from blank()) == ":")
        character = yield from blank()
        if key in ("name", "tool_name"):
            reader.certain()
            expect(character == '"')
            reader.name((yield from _text(names)))
            character = yield from blank()
        elif key in ("arguments", "parameters") and not is_given:
            is_given = True
            yield from _arguments(reader, character)
            character = yield from blank()
        else:
            character = yield from skip(character)
        if character != ",":
            break
        character = yield from blank()
        expect(character == '"')
    expect(character == "}")
    reader.close()


def _text(known: Collection[str] | None) -> Scan[str]:
    if known is not None:
        return (yield from one_of(known, '"'))
    characters: list[str] = []
    yield from quoted(characters.append)
    return "".join(characters)


def _arguments(reader: Reader, first: str) -> Scan[None]:
    """An object as it is written; in a string, as the string has it; null and "" are none."""
    is_begun = False

    def take(text: str) -> None:
        """The text of a string: an object, with nothing but blanks before it."""
        nonlocal is_begun
        is_begun = is_begun or text == "{"
        expect(is_begun or text in BLANKS)
        if is_begun:
            reader.arguments(text)

    if first == "n":
        yield from literal("ull")
    elif first == '"':
        yield from quoted(take)
    else:
        expect(first == "{")
        yield from value(first, reader.arguments)
