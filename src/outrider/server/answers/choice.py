"""One choice of an answer as it grows: what its updates say, told apart and put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import uuid4

from outrider.core.data import TokenLogprob, Update
from outrider.formats import (
    ContentDelta,
    Event,
    Reader,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from outrider.server.jobs import Job

__all__ = ["Choice", "FinishName", "ToolCall", "merged"]

FinishName = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one generation has given so far. `reader` tells calls and reasoning from content; without one
    everything is content. `target_calls` and `generated_tokens` are so far."""

    index: int
    job: Job
    reader: Reader | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    target_calls: int = 0
    generated_tokens: int = 0

    def take(self, update: Update | None) -> list[Event]:
        """What an update adds; None: the generation has ended."""
        events: list[Event] = []
        if update is None:
            events += self._ended()
        else:
            self.target_calls += update.record.kind == "decode"
            self.generated_tokens += len(update.record.tokens)
            self.scored += update.record.logprobs
            for piece in update.pieces:
                events += self._read(piece.text, piece.source)
        events = merged(events)
        for event in events:
            self._keep(event)
        return events

    def _read(self, text: str, source: str) -> list[Event]:
        return [ContentDelta(text, source)] if self.reader is None else self.reader.push((text, source))

    def _ended(self) -> list[Event]:
        return [] if self.reader is None else self.reader.end()

    def _keep(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            self.calls.append(ToolCall(f"call_{uuid4().hex[:24]}", event.name))
        else:
            self.calls[event.index].arguments += event.text

    def told(self, events: Iterable[Event]) -> dict[str, Any]:
        """The `outrider` object of a chunk: whose text it has, and the counts so far."""
        return {
            "pieces": [[event.text, event.source] for event in events if isinstance(event, ContentDelta)],
            "target_calls": self.target_calls,
            "generated_tokens": self.generated_tokens,
        }

    def take_scored(self) -> list[TokenLogprob]:
        """The log probabilities that nobody has taken yet."""
        scored, self.scored = self.scored, []
        return scored

    @property
    def finish_reason(self) -> FinishName:
        """Why the choice ended, in OpenAI's terms."""
        if self.job.completion.finish_reason in ("length", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind and one source joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ToolCallStart) or isinstance(last, ToolCallStart | None):
            joined.append(event)
        elif _origin(last) == _origin(event):
            joined[-1] = replace(event, text=last.text + event.text)
        else:
            joined.append(event)
    return joined


def _origin(event: ContentDelta | ReasoningDelta | ToolArgumentsDelta) -> tuple[type, str, int]:
    """What texts have in common that may be joined."""
    return type(event), event.source, event.index if isinstance(event, ToolArgumentsDelta) else 0
