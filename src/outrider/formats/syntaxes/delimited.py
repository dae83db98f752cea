"""Calls between markers: names with arguments in JSON, and lists of JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import NUMBER, Rules, repeated
from outrider.formats.scan import Scan, Sink, blank, call, either, expect, until, value
from outrider.formats.syntaxes.base import PROBE

_MARKER = re.compile(r'<[^<>\s="]+>')


@dataclass(frozen=True)
class Delimited(ABC):
    """`opener` and `closer` are around each call, `section` around all of them, `separator` between two.
    White space is written as it is here, and read however it comes."""

    name: str
    opener: str
    closer: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""

    begins = "<"
    begins_line = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of the texts that may be control tokens."""
        texts = [
            text for field in astuple(self)[1:] for text in ([field] if isinstance(field, str) else field)
        ]
        return tuple(dict.fromkeys(_MARKER.findall("\n".join(texts))))

    @property
    def closers(self) -> tuple[str, ...]:
        """What may come after calls."""
        return tuple(text.strip() for text in (self.closer, self.section[1]) if text)

    def is_of(self, source: str, rendered: str) -> bool:
        """Whether the rendered call is this syntax's, up to what ends it; of a template that renders none:
        whether it mentions an opener that is a control token."""
        if PROBE.name not in rendered:
            return self.opener.startswith(("<|", "<｜")) and _MARKER.findall(self.opener)[0] in source
        return self.written([PROBE]).partition("probe value")[0] in rendered

    def written(self, calls: Sequence[Call]) -> str:
        texts = (f"{self.opener}{self._inside(one, i)}{self.closer}" for i, one in enumerate(calls))
        return f"{self.section[0]}{self.separator.join(texts)}{self.section[1]}"

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        one = rules.choice([self._rule(rules, tool) for tool in tools])
        first = rules.opener(self.section[0] + self.opener, free=free)
        following = f"{rules.marker(self.separator + self.opener)} {one}"
        return [f"{repeated(f'{first} {one}', following, max_calls)} {rules.marker(self.section[1])}"]

    def scan(self, first: str, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        found = yield from either([self.section[0] + self.opener, self.opener], first)
        while True:
            yield from self._scan_call(sink, tools)
            sink.drop()
            if found or not self.section[1]:
                return
            if not (yield from either([self.section[1], self.separator + self.opener])):
                sink.drop()
                return

    @abstractmethod
    def _inside(self, call: Call, index: int) -> str:
        """What is written between opener and closer."""

    @abstractmethod
    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        """The part of a grammar for a call of this tool, after the opener, closer included."""

    @abstractmethod
    def _scan_call(self, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        """Read a call after its opener, closer included."""


@dataclass(frozen=True)
class Named(Delimited):
    """A name, `between`, and the arguments in JSON. In `between`, "{number}" is the number of the call."""

    between: str = ""

    def _inside(self, call: Call, index: int) -> str:
        between = self.between.replace(NUMBER, str(index))
        return f"{call.name}{between}{json.dumps(call.arguments, ensure_ascii=False)}"

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        return f"{name} {rules.marker(self.between)} {rules.arguments(tool)} {rules.marker(self.closer)}"

    def _scan_call(self, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        del tools
        before_number, _, tail = self.between.rpartition(NUMBER)
        text = yield from until("".join(tail.split()))
        sink.name((text.rpartition(before_number)[0] if before_number else text).strip())
        expect((yield from blank()) == "{")
        yield from value("{", sink.arguments)
        sink.close()
        yield from either([self.closer])


@dataclass(frozen=True)
class Listed(Delimited):
    """All calls in one pair of markers, as JSON objects: `begin` comes before the first, `comma` between
    two, `end` after the last. An object begins with `head`, the name and, under `key`, the arguments."""

    begin: str = "["
    comma: str = ", "
    end: str = "]"
    head: str = '{"name": '
    key: str = "arguments"

    def written(self, calls: Sequence[Call]) -> str:
        texts = self.comma.join(self._inside(one, i) for i, one in enumerate(calls))
        return f"{self.opener}{self.begin}{texts}{self.end}{self.closer}"

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        one = rules.choice([self._rule(rules, tool) for tool in tools])
        first = f"{rules.opener(self.opener, free=free)} {rules.marker(self.begin)} {one}"
        following = f"{rules.marker(self.comma)} {one}"
        return [f"{repeated(first, following, max_calls)} {rules.marker(self.end + self.closer)}"]

    def _inside(self, call: Call, index: int) -> str:
        name, arguments = (json.dumps(part, ensure_ascii=False) for part in call)
        return f'{self.head.replace(NUMBER, str(index))}{name}, "{self.key}": {arguments}}}'

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        name = f'{json.dumps(tool.name, ensure_ascii=False)}, "{self.key}": '
        return f'{rules.marker(self.head)} {json.dumps(name)} {rules.arguments(tool)} "}}"'

    def _scan_call(self, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        del tools
        character = yield from blank()
        is_list = character == "["
        if is_list:
            character = yield from blank()
        while character == "{":
            yield from call(sink, None)
            if not is_list and not self.closer:
                return
            if (character := (yield from blank())) == ",":
                character = yield from blank()
        if is_list:
            expect(character == "]")
            character = ""
        yield from either([self.closer], character)
