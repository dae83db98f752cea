"""What every way to write tool calls shares: markers around them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import NUMBER, Rules, repeated
from outrider.formats.reader import Reader
from outrider.formats.scan import Scan, blank, either, expect, until, value

PROBE = Call("probe_tool", {"probe_key": "probe value"})
"""What templates are tried with."""
_MARKER = re.compile(r'<[^<>\s="]+>|\[[A-Z_]+\]')


@dataclass(frozen=True, kw_only=True)
class CallSyntax(ABC):
    """How a chat format writes calls: `opener` and `closer` are around each, `section` around all of them,
    `separator` between two. White space is written as it is here, and read however it comes."""

    name: str
    opener: str = ""
    closer: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Parts of the texts that may be control tokens."""
        fields = (field if isinstance(field, tuple) else (field,) for field in astuple(self)[1:])
        texts = [text for field in fields for text in field if isinstance(text, str)]
        return tuple(dict.fromkeys(_MARKER.findall("\n".join(texts))))

    @property
    def openers(self) -> tuple[str, ...]:
        """What calls may begin with."""
        return self.section[0] + self.opener, self.opener

    def is_of(self, source: str, rendered: str) -> bool:
        """Whether a template with this source writes calls so: `rendered` is what it made of the call
        `PROBE`. One that renders no calls has to mention an opener that is a control token."""
        if PROBE.name not in rendered:
            return self.opener.startswith(("<|", "<｜")) and _MARKER.findall(self.opener)[0] in source
        return self.written([PROBE]).partition("probe value")[0] in rendered

    def written(self, calls: Sequence[Call]) -> str:
        """The calls as the model writes them."""
        texts = (f"{self.opener}{self._inside(one, i)}{self.closer}" for i, one in enumerate(calls))
        return f"{self.section[0]}{self.separator.join(texts)}{self.section[1]}"

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        """One to `max_calls` calls, as parts of a grammar of which one has to match; `free`: after any
        text."""
        one = rules.choice([self._rule(rules, tool) for tool in tools])
        first = rules.opener(self.openers[0], free=free)
        following = f"{rules.marker(self.separator + self.opener)} {one}"
        return [f"{repeated(f'{first} {one}', following, max_calls)} {rules.marker(self.section[1])}"]

    def scan_from(self, first: str, reader: Reader) -> Scan[None] | None:
        """What reads a call, or a marker of one, that may begin with this character; None: none can."""
        return self.scan(first, reader) if any(text.startswith(first) for text in self.openers) else None

    def scan(self, first: str, reader: Reader) -> Scan[None]:
        """Read what follows that character."""
        found = yield from either(self.openers, first)
        reader.certain()
        while True:
            yield from self._scan_call(reader)
            reader.drop()
            if found or not self.section[1]:
                return
            if not (yield from either([self.section[1], self.separator + self.opener])):
                reader.drop()
                return

    @abstractmethod
    def _inside(self, call: Call, index: int) -> str:
        """What is written between opener and closer."""

    @abstractmethod
    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        """The part of a grammar for a call of this tool, after the opener, closer included."""

    @abstractmethod
    def _scan_call(self, reader: Reader) -> Scan[None]:
        """Read a call after its opener, closer included."""


@dataclass(frozen=True, kw_only=True)
class Named(CallSyntax):
    """A name, `between`, and the arguments in JSON. In `between`, "{number}" is the number of the call."""

    between: str

    def _inside(self, call: Call, index: int) -> str:
        return f"{call.name}{self.between.replace(NUMBER, str(index))}{as_json(call.arguments)}"

    def _rule(self, rules: Rules, tool: ToolSpec) -> str:
        between, closer = rules.marker(self.between), rules.marker(self.closer)
        return f"{as_json(tool.name)} {between} {rules.arguments(tool)} {closer}"

    def _scan_call(self, reader: Reader) -> Scan[None]:
        before_number, _, tail = self.between.rpartition(NUMBER)
        text = yield from until("".join(tail.split()))
        reader.name((text.rpartition(before_number)[0] if before_number else text).strip())
        expect((yield from blank()) == "{")
        yield from value("{", reader.arguments)
        reader.close()
        yield from either([self.closer])


def as_json(given: object) -> str:
    """JSON as models write it."""
    return json.dumps(given, ensure_ascii=False)
