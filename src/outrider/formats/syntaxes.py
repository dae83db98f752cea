"""How chat formats write tool calls: as grammars that demand them, and as scans that read them."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from outrider.formats.conversation import ToolSpec
from outrider.formats.grammar import Rules, bare_calls, repeated
from outrider.formats.scan import Scan, Sink, blank, call, expect, literal, one_of, value

_NO_JSON = ("<function=", "<arg_key>")
"""Signs of templates whose <tool_call> holds no JSON."""
_NAME = string.ascii_letters + string.digits + "_-."


class CallSyntax(Protocol):
    """How a chat format writes calls. `markers` may be control tokens of the vocabulary; `closer` is the
    marker after a call, where there is one. A call, or a marker of one, begins with one of the characters of
    `begins`, or of `begins_line` at the start of a line."""

    name: str
    markers: tuple[str, ...]
    closer: str
    begins: str
    begins_line: str

    @classmethod
    def of(cls, template: str) -> Self | None:
        """The syntax of a chat template's source; None where the template writes calls in another way."""

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        """One to `max_calls` calls, as parts of a grammar of which one has to match; `free`: after any
        text."""

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        """Read what follows that character; `names` are those of the tools."""


class Hermes:
    """Hermes and Qwen: `<tool_call>`, `{"name": …, "arguments": {…}}` and `</tool_call>` on a line each.

    A call without markers counts, too, where a line begins with it: some models leave them out.
    """

    name = "hermes"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    closer = "</tool_call>"
    begins = "<"
    begins_line = "{"

    @classmethod
    def of(cls, template: str) -> Self | None:
        is_json = not any(sign in template for sign in _NO_JSON)
        return cls() if "<tool_call>" in template and is_json else None

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        inside = rules.named(f'"\\n" {rules.objects(tools)} "\\n" {rules.marker(self.closer)}')
        bare = bare_calls(rules, tools, max_calls, key="arguments", separator="\n") if free else []
        first, opener = rules.opener("<tool_call>", free=free), rules.marker("<tool_call>")
        return [repeated(f"{first} {inside}", f'"\\n" {opener} {inside}', max_calls), *bare]

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        if first == "{":
            yield from call(sink, names)
            return
        words = ("tool_call", "/tool_call") if sink.is_after_call else ("tool_call",)
        if (yield from one_of(words, ">")) == "/tool_call":
            sink.drop()
            return
        expect((yield from blank()) == "{")
        yield from call(sink, None)


class Mistral:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    Both are read, whatever the template writes; `template` decides which is demanded.
    """

    name = "mistral"
    closer = ""
    begins = "["
    begins_line = ""

    def __init__(self, template: str) -> None:
        self.markers = tuple(m for m in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]") if m in template)

    @classmethod
    def of(cls, template: str) -> Self | None:
        return cls(template) if "[TOOL_CALLS]" in template else None

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        first, opener = rules.opener("[TOOL_CALLS]", free=free), rules.marker("[TOOL_CALLS]")
        if "[ARGS]" in self.markers:
            has_id = "[CALL_ID]" in self.markers
            call_id = f"({rules.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? " if has_id else ""
            between = f"{call_id}{rules.marker('[ARGS]')}"
            one = rules.choice([f"{json.dumps(t.name)} {between} {rules.arguments(t)}" for t in tools])
            return [repeated(f"{first} {one}", f"{opener} {one}", max_calls)]
        one = rules.objects(tools)
        several = repeated(one, f'", " {one}', max_calls)
        # Tokenizers of the older models put a blank after the marker.
        return [f'{first} (" ")? "[" {several} "]"']

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        del first, names
        yield from literal("TOOL_CALLS]")
        character = yield from blank()
        if character == "{":
            yield from call(sink, None)
        elif character != "[":
            yield from _named(character, sink)
        else:
            following = ","
            while following == ",":
                expect((yield from blank()) == "{")
                yield from call(sink, None)
                following = yield from blank()
            expect(following == "]")
            sink.drop()


def _named(character: str, sink: Sink) -> Scan[None]:
    name = ""
    while character in _NAME:
        name += character
        character = yield
    if character == "[" and (yield from one_of(("ARGS", "CALL_ID"), "]")) == "CALL_ID":
        while (yield) != "[":
            pass
        yield from literal("ARGS]")
    sink.name(name)
    if character == "[" or character.isspace():
        character = yield from blank()
    expect(character == "{")
    yield from value(character, sink.arguments)
    sink.close()


@dataclass(slots=True)
class Objects:
    """Calls that are nothing but JSON objects with a name and, under `key`, the arguments: Llama 3's, and
    those of models that know no tools. `separator` is put between them.

    Where an answer may call tools, but need not, a line that begins with an object whose first
    key is the name of a tool is a call; so is what follows a marker (Llama's <|python_tag|>).
    """

    name: str
    key: str
    separator: str
    markers: tuple[str, ...] = ()
    begins: str = ""
    begins_line: str = "{"
    closer: str = ""

    @classmethod
    def of(cls, template: str) -> Self | None:
        is_llama = "<|python_tag|>" in template
        is_llama |= "<|start_header_id|>" in template and '"parameters"' in template
        return cls("llama3", "parameters", "; ", ("<|python_tag|>",), "<") if is_llama else None

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        bare = bare_calls(rules, tools, max_calls, key=self.key, separator=self.separator) if free else []
        one = rules.objects(tools, self.key)
        firsts = [f"{rules.up_to(tag)} {one}" for tag in self.markers] if free else [one]
        return [
            *bare,
            *(repeated(first, f"{json.dumps(self.separator)} {one}", max_calls) for first in firsts),
        ]

    def as_text(self, name: str, arguments: str) -> str:
        """A call as the model would write it."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": {arguments}}}'

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        if first == "<":
            yield from literal(self.markers[0][1:])
            expect((yield from blank()) == "{")
        while True:
            yield from call(sink, None if first == "<" else names)
            if (following := (yield from blank())) == ";":
                following = yield from blank()
            expect(following == "{")


SYNTAXES: tuple[type[CallSyntax], ...] = (Mistral, Hermes, Objects)
"""All that are known; the first that takes a template holds."""
