"""Chat completions: the whole answer, and the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from outrider.core.data import Update
from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from outrider.server.answers.account import account_of, usage_of
from outrider.server.answers.choice import Choice
from outrider.server.answers.logprobs import chat_entries, shown
from outrider.server.prepare.plan import Plan
from outrider.server.service import Service

__all__ = ["ChatAnswer"]

Chunk = dict[str, Any]


class ChatAnswer:
    """The answer to one chat request, whole or in chunks. `with_usage` is `stream_options.include_usage`."""

    def __init__(
        self, service: Service, plan: Plan, choices: Sequence[Choice], *, with_usage: bool = False
    ) -> None:
        self.service = service
        self.plan = plan
        self.choices = choices
        self._with_usage = with_usage
        self._has_logprobs = plan.requests[0].logprobs is not None
        self._head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    # Whole

    def whole(self) -> dict[str, Any]:
        """The answer when every choice has ended."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in self.choices],
            **self._sums(),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice),
        }

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        vocabulary = self.service.vocabulary
        visible = self.plan.requests[0].visible
        return {
            "content": chat_entries(shown(choice.take_scored(), vocabulary, visible), vocabulary),
            "refusal": None,
        }

    def _sums(self) -> dict[str, Any]:
        jobs = [choice.job for choice in self.choices]
        thought = sum(self.service.count_tokens(choice.reasoning) for choice in self.choices)
        return {
            "usage": usage_of(self.plan, jobs, thought),
            "outrider": account_of(self.plan, jobs, self.service.policy),
        }

    # In chunks

    def first(self) -> Iterator[Chunk]:
        """A chunk for each choice that says who speaks."""
        for choice in self.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def next(self, choice: Choice, update: Update | None) -> Iterator[Chunk]:
        """The chunks that an update of a choice gives; None: it has ended."""
        for delta, events in _deltas(choice, choice.take(update)):
            chunk = self._chunk(choice, delta, self._streamed_logprobs(choice))
            if self.plan.show_sources:
                chunk["outrider"] = choice.told(events)
            yield chunk
        if update is None:
            rest = self._streamed_logprobs(choice)
            yield self._chunk(choice, {}, rest, finish_reason=choice.finish_reason)

    def _streamed_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        found = self._logprobs(choice)
        return found if found and found["content"] else None

    def last(self, chunk: Chunk) -> Iterator[Chunk]:
        """The chunks at the end of the stream, where `chunk` would have been the last one."""
        if not self._with_usage:
            yield chunk | {"outrider": chunk.get("outrider", {}) | self._sums()["outrider"]}
            return
        yield chunk
        yield {**self._head, "object": "chat.completion.chunk", "choices": [], **self._sums()}

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        *,
        finish_reason: str | None = None,
    ) -> Chunk:
        entry = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [entry]}
        return chunk | {"usage": None} if self._with_usage else chunk


def _deltas(choice: Choice, events: Sequence[Event]) -> Iterator[tuple[dict[str, Any], list[Event]]]:
    """Deltas in the order of the events, neighbours of one kind in one, and the events of each."""
    for kind, group in groupby(events, type):
        found = list(group)
        if kind is ContentDelta:
            yield (
                {"content": "".join(event.text for event in found if isinstance(event, ContentDelta))},
                found,
            )
        elif kind is ReasoningDelta:
            text = "".join(event.text for event in found if isinstance(event, ReasoningDelta))
            yield {"reasoning_content": text}, found
        else:
            yield {"tool_calls": [_call_delta(choice, event) for event in found]}, found


def _call_delta(choice: Choice, event: Event) -> dict[str, Any]:
    if isinstance(event, ToolCallStart):
        call = choice.calls[event.index]
        function = {"name": call.name, "arguments": ""}
        return {"index": event.index, "id": call.id, "type": "function", "function": function}
    assert isinstance(event, ToolArgumentsDelta)
    return {"index": event.index, "function": {"arguments": event.text}}
