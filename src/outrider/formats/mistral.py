"""The calls of Mistral's models, behind [TOOL_CALLS]."""

from __future__ import annotations

import json
import string
from collections.abc import Collection, Sequence

from outrider.formats.data import ToolSpec
from outrider.formats.lark import Rules, repeated
from outrider.formats.scan import Scan, Sink, blank, call, expect, literal, one_of, value

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = string.ascii_letters + string.digits + "_-."


class Mistral:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call.

    Both are read, whatever the template writes; `template` decides which is demanded.
    """

    name = "mistral"
    closer = ""

    def __init__(self, template: str) -> None:
        self.markers: tuple[str, ...] = tuple(marker for marker in (_CALLS, _ARGS, _ID) if marker in template)

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> str:
        return self._calls(rules, tools, rules.marker(_CALLS), most)

    def free_calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> list[str]:
        return [self._calls(rules, tools, rules.up_to(_CALLS), most)]

    def _calls(self, rules: Rules, tools: Sequence[ToolSpec], lead: str, most: int) -> str:
        if _ARGS in self.markers:
            call_id = f"({rules.marker(_ID)} /[a-zA-Z0-9]{{9}}/)? " if _ID in self.markers else ""
            between = f"{call_id}{rules.marker(_ARGS)}"
            one = rules.choice([f"{json.dumps(t.name)} {between} {rules.arguments(t)}" for t in tools])
            return repeated(f"{lead} {one}", f"{rules.marker(_CALLS)} {one}", most)
        one = rules.objects(tools)
        # Tokenizers of the older models put a blank behind the marker.
        several = repeated(one, f'", " {one}', most)
        return f'{lead} (" ")? "[" {several} "]"'

    def begins(self, character: str, *, line_start: bool) -> bool:
        del line_start
        return character == "["

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        del first, names
        yield from literal(_CALLS[1:])
        character = yield from blank()
        if character == "[":
            yield from _list(sink)
        elif character == "{":
            yield from call(sink, None)
        else:
            yield from _named(character, sink)


def _list(sink: Sink) -> Scan[None]:
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
        yield from literal(_ARGS[1:])
    sink.name(name)
    if character == "[" or character.isspace():
        character = yield from blank()
    expect(character == "{")
    yield from value(character, sink.arguments)
    sink.close()
