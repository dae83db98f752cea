"""What every way to write tool calls provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from outrider.formats.conversation import Call, ToolSpec
from outrider.formats.grammar import Rules
from outrider.formats.scan import Scan, Sink

PROBE = Call("probe_tool", {"probe_key": "probe value"})
"""What templates are tried with."""


class CallSyntax(Protocol):
    """How a chat format writes calls. `markers` may be control tokens of the vocabulary; `closers` are
    what may come after calls. A call, or a marker of one, begins with one of the
    characters of `begins`, or of `begins_line` at the start of a line."""

    @property
    def name(self) -> str: ...
    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def closers(self) -> tuple[str, ...]: ...
    @property
    def begins(self) -> str: ...
    @property
    def begins_line(self) -> str: ...

    def is_of(self, source: str, rendered: str) -> bool:
        """Whether a template writes calls so: one with this source, which renders a call like that."""

    def written(self, calls: Sequence[Call]) -> str:
        """The calls as the model writes them."""

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, free: bool) -> list[str]:
        """One to `max_calls` calls, as parts of a grammar of which one has to match; `free`: after any
        text."""

    def scan(self, first: str, sink: Sink, tools: Mapping[str, ToolSpec]) -> Scan[None]:
        """Read what follows that character; `tools` by their names."""
