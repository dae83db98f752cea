"""Calls that are nothing but JSON objects: Llama 3's, and those of models that know no tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from outrider.formats.data import ToolSpec
from outrider.formats.lark import Rules, bare_calls, repeated
from outrider.formats.scan import Scan, Sink, blank, call, expect, literal

_TAG = "<|python_tag|>"


class Objects:
    """Calls as objects with a name and, under `key`, the arguments; `separator` stands between them.

    Where an answer may call tools, but need not, a line that begins with an object whose first
    key is the name of a tool is a call; so is what follows Llama's <|python_tag|> (`has_tag`).
    """

    closer = ""

    def __init__(self, name: str, key: str, separator: str, *, has_tag: bool) -> None:
        self.name = name
        self.markers: tuple[str, ...] = (_TAG,) if has_tag else ()
        self._key = key
        self._separator = separator

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> str:
        one = rules.objects(tools, self._key)
        return repeated(one, f"{json.dumps(self._separator)} {one}", most)

    def free_calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> list[str]:
        found = bare_calls(rules, tools, most, key=self._key, separator=self._separator)
        one = rules.objects(tools, self._key)
        following = f"{json.dumps(self._separator)} {one}"
        return [*found, *(repeated(f"{rules.up_to(tag)} {one}", following, most) for tag in self.markers)]

    def spelled(self, name: str, arguments: str) -> str:
        """A call as text."""
        return f'{{"name": {json.dumps(name)}, "{self._key}": {arguments}}}'

    def begins(self, character: str, *, line_start: bool) -> bool:
        return (character == "{" and line_start) or (character == "<" and bool(self.markers))

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        if first == "<":
            yield from literal(_TAG[1:])
            expect((yield from blank()) == "{")
        while True:
            yield from call(sink, None if first == "<" else names)
            if (following := (yield from blank())) == ";":
                following = yield from blank()
            expect(following == "{")
