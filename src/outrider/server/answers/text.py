"""Chat completions and completions: the whole answer, and the chunks of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar
from uuid import uuid4

from outrider.core.data import Update
from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from outrider.server.answers.choice import Answer, Choice, TextOffsets, account_of, chat_logprobs, usage_of
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.service import Service

Chunk = dict[str, Any]
Entry = tuple[dict[str, Any], Sequence[Event]]


class _TextAnswer(Answer):
    """`with_usage` is `stream_options.include_usage`."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, service: Service, plan: GenerationPlan, choices: Sequence[Choice], *, with_usage: bool = False
    ) -> None:
        self.service = service
        self.plan = plan
        self.choices = choices
        self._with_usage = with_usage
        self._num_open = len(choices)
        self._head = {
            "id": f"{self.id_prefix}{uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in self.choices]
        return {**self._head, "object": self.object, "choices": choices, **self._sums()}

    def next(self, choice: Choice, update: Update | None) -> Iterator[Chunk]:
        for entry, events in self._entries(choice, choice.take(update)):
            chunk = self._chunk(entry)
            if self.plan.show_sources:
                chunk["outrider"] = choice.progress(events)
            yield chunk
        if update is None:
            self._num_open -= 1
            chunk = self._chunk(self._last_entry(choice))
            if self._num_open:
                yield chunk
            elif self._with_usage:
                yield chunk
                yield {**self._head, "choices": [], **self._sums()}
            else:
                yield chunk | {"outrider": self._sums()["outrider"]}

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The entry of `choices` in the whole answer."""

    @abstractmethod
    def _entries(self, choice: Choice, events: Sequence[Event]) -> Iterator[Entry]:
        """Entries of `choices` in chunks for these events, and the events of each."""

    @abstractmethod
    def _last_entry(self, choice: Choice) -> dict[str, Any]:
        """The entry that says why a choice ended."""

    def _chunk(self, entry: dict[str, Any]) -> Chunk:
        chunk = {**self._head, "choices": [entry]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def _sums(self) -> dict[str, Any]:
        jobs = [choice.job for choice in self.choices]
        reasoning_tokens = sum(self.service.count_tokens(choice.reasoning) for choice in self.choices)
        return {
            "usage": usage_of(self.plan, jobs, reasoning_tokens),
            "outrider": account_of(self.plan, jobs, self.service.policy),
        }


class ChatAnswer(_TextAnswer):
    """The answer to one chat request."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self) -> Iterator[Chunk]:
        for choice in self.choices:
            yield self._chunk(self._entry(choice, {"role": "assistant", "content": ""}, None))

    def _whole(self, choice: Choice) -> dict[str, Any]:
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

    def _entries(self, choice: Choice, events: Sequence[Event]) -> Iterator[Entry]:
        """Deltas in the order of the events, neighbours of one kind in one."""
        for kind, group in groupby(events, type):
            found = list(group)
            if kind in _FIELDS:
                delta: dict[str, Any] = {_FIELDS[kind]: _text(found)}
            else:
                delta = {"tool_calls": [_call_delta(choice, event) for event in found]}
            yield self._entry(choice, delta, self._streamed_logprobs(choice)), found

    def _last_entry(self, choice: Choice) -> dict[str, Any]:
        entry = self._entry(choice, {}, self._streamed_logprobs(choice))
        return entry | {"finish_reason": choice.finish_reason}

    def _entry(
        self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self.plan.has_logprobs:
            return None
        vocabulary = self.service.vocabulary
        scored = choice.take_scored(vocabulary, self.plan.requests[0].visible)
        return {"content": chat_logprobs(scored, vocabulary), "refusal": None}

    def _streamed_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        found = self._logprobs(choice)
        return found if found and found["content"] else None


_FIELDS: dict[type, str] = {ContentDelta: "content", ReasoningDelta: "reasoning_content"}


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if not isinstance(event, ToolCallStart))


def _call_delta(choice: Choice, event: Event) -> dict[str, Any]:
    if isinstance(event, ToolCallStart):
        call = choice.calls[event.index]
        function = {"name": call.name, "arguments": ""}
        return {"index": event.index, "id": call.id, "type": "function", "function": function}
    assert isinstance(event, ToolArgumentsDelta)
    return {"index": event.index, "function": {"arguments": event.text}}


class CompletionAnswer(_TextAnswer):
    """The answer to one request for completions."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(
        self, service: Service, plan: GenerationPlan, choices: Sequence[Choice], *, with_usage: bool = False
    ) -> None:
        super().__init__(service, plan, choices, with_usage=with_usage)
        self._offsets = [TextOffsets(service.vocabulary, len(echo)) for echo in plan.echoes]

    def first(self) -> Iterator[Chunk]:
        for choice, echo in zip(self.choices, self.plan.echoes, strict=True):
            if echo:
                yield self._chunk(self._entry(choice, echo))

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, self.plan.echoes[choice.index] + choice.content, choice.finish_reason)

    def _entries(self, choice: Choice, events: Sequence[Event]) -> Iterator[Entry]:
        if events:
            yield self._entry(choice, _text(events)), events

    def _last_entry(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, "", choice.finish_reason)

    def _entry(self, choice: Choice, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self.plan.has_logprobs and (scored := choice.take_scored(self.service.vocabulary)):
            logprobs = self._offsets[choice.index].logprobs(scored)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
