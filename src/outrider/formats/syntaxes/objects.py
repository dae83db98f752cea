"""Calls that are JSON objects with a name and arguments: Hermes', Mistral's, Llama 3's, and plain ones."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import Rules, bare_calls, repeated
from outrider.formats.scan import Scan, Sink, blank, call, expect, literal, one_of, value
from outrider.formats.syntaxes.base import PROBE

_NO_JSON = ("<function=", "<arg_key>")
"""Signs of templates whose <tool_call> holds no JSON."""
_NAME = string.ascii_letters + string.digits + "_-."


class Hermes:
    """Hermes and Qwen: `<tool_call>`, `{"name": …, "arguments": {…}}` and `</tool_call>` on a line each.

    A call without markers counts, too, where a line begins with it: some models leave them out.
    """

    name = "hermes"
    markers: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    closers: tuple[str, ...] = ("</tool_call>",)
    begins = "<"
    begins_line = "{"

    def is_of(self, source: str, rendered: str) -> bool:
        is_json = not any(sign in source for sign in _NO_JSON)
        return "<tool_call>" in source and is_json and _writes_json(rendered)

    def written(self, calls: Sequence[Call]) -> str:
        texts = (_object(one, "arguments") for one in calls)
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        inside = rules.named(f'"\\n" {rules.objects(tools)} "\\n" {rules.marker("</tool_call>")}')
        bare = bare_calls(rules, tools, max_calls, key="arguments", separator="\n") if free else []
        first, opener = rules.opener("<tool_call>", free=free), rules.marker("<tool_call>")
        return [repeated(f"{first} {inside}", f'"\\n" {opener} {inside}', max_calls), *bare]

    def scan(self, first: str, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        if first == "{":
            yield from call(sink, tools)
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
    closers: tuple[str, ...] = ()
    begins = "["
    begins_line = ""

    def __init__(self, *markers: str) -> None:
        self.markers = ("[TOOL_CALLS]", *markers)

    def is_of(self, source: str, rendered: str) -> bool:
        return all(marker in source for marker in self.markers) and _writes_json(rendered)

    def written(self, calls: Sequence[Call]) -> str:
        if len(self.markers) == 1:
            return f"[TOOL_CALLS][{', '.join(_object(one, 'arguments') for one in calls)}]"
        between = "[CALL_ID]probe1234[ARGS]" if "[CALL_ID]" in self.markers else "[ARGS]"
        return "".join(f"[TOOL_CALLS]{c.name}{between}{_json(c.arguments)}" for c in calls)

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

    def scan(self, first: str, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        del first, tools
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
    closers: tuple[str, ...] = ()

    def is_of(self, source: str, rendered: str) -> bool:
        is_llama = "<|python_tag|>" in source
        is_llama |= "<|start_header_id|>" in source and '"parameters"' in source
        return bool(self.markers) and is_llama and _writes_json(rendered)

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        bare = bare_calls(rules, tools, max_calls, key=self.key, separator=self.separator) if free else []
        one = rules.objects(tools, self.key)
        firsts = [f"{rules.opener(tag, free=True)} {one}" for tag in self.markers] if free else [one]
        return [
            *bare,
            *(repeated(first, f"{json.dumps(self.separator)} {one}", max_calls) for first in firsts),
        ]

    def written(self, calls: Sequence[Call]) -> str:
        return self.separator.join(_object(one, self.key) for one in calls)

    def scan(self, first: str, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        if first == "<":
            yield from literal(self.markers[0][1:])
            expect((yield from blank()) == "{")
        while True:
            yield from call(sink, None if first == "<" else tools)
            if (following := (yield from blank())) == ";":
                following = yield from blank()
            expect(following == "{")


def _writes_json(rendered: str) -> bool:
    """Whether the probe was written with its arguments in JSON; white space and the order of keys differ."""
    return PROBE.name in rendered and all(f'"{key}"' in rendered for key in PROBE.arguments)


def _json(given: Any) -> str:
    return json.dumps(given, ensure_ascii=False)


def _object(call: Call, key: str) -> str:
    return f'{{"name": {_json(call.name)}, "{key}": {_json(call.arguments)}}}'
