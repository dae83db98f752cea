"""The calls of Hermes and Qwen: an object between <tool_call> and </tool_call>."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.formats.data import ToolSpec
from outrider.formats.lark import Rules, bare_calls, repeated
from outrider.formats.scan import Scan, Sink, blank, call, expect, one_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """`<tool_call>`, `{"name": …, "arguments": {…}}` and `</tool_call>` on a line each.

    A call without markers counts, too, where a line begins with it: some models leave them out.
    """

    name = "hermes"
    markers: tuple[str, ...] = (_OPEN, _CLOSE)
    closer = _CLOSE

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> str:
        inside = self._inside(rules, tools)
        one = f"{rules.marker(_OPEN)} {inside}"
        return repeated(one, f'"\\n" {one}', most)

    def free_calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> list[str]:
        inside = self._inside(rules, tools)
        more = f'"\\n" {rules.marker(_OPEN)} {inside}'
        bare = bare_calls(rules, tools, most, key="arguments", separator="\n")
        return [repeated(f"{rules.up_to(_OPEN)} {inside}", more, most), *bare]

    def _inside(self, rules: Rules, tools: Sequence[ToolSpec]) -> str:
        """A call behind its first marker."""
        return rules.named(f'"\\n" {rules.objects(tools)} "\\n" {rules.marker(_CLOSE)}')

    def begins(self, character: str, *, line_start: bool) -> bool:
        return character == "<" or (character == "{" and line_start)

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        if first == "{":
            yield from call(sink, names)
            return
        words = ("tool_call", "/tool_call") if sink.is_behind_call else ("tool_call",)
        if (yield from one_of(words, ">")) == "/tool_call":
            sink.drop()
            return
        expect((yield from blank()) == "{")
        yield from call(sink, None)
