"""Chat completions and completions: the whole answer, and the chunks of a stream."""

from __future__ import annotations

import codecs
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar

from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, TokenLogprob, Update
from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from outrider.server.answers.choice import Answer, Choice, finite, spelling_of
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.requests import ChatRequest, CompletionRequest
from outrider.server.service import Service

Chunk = dict[str, Any]


class _TextAnswer(Answer):
    done = "[DONE]"
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    nothing: ClassVar[Any]
    """what a choice's last chunk adds"""

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._num_open = len(self.choices)
        self._head = {
            "id": f"{self.id_prefix}{self.id}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        choices = [self._whole(choice) for choice in self.choices]
        return {**self._head, "object": self.object, "choices": choices, **self.sums()}

    def next(self, choice: Choice, outcome: Update | Completion) -> Iterator[Chunk]:
        for delta, events in self._deltas(choice, choice.take(outcome)):
            chunk = self._chunk(choice, delta)
            if self.plan.show_sources:
                chunk["outrider"] = choice.progress(events)
            yield chunk
        if isinstance(outcome, Completion):
            self._num_open -= 1
            chunk = self._chunk(choice, self.nothing, choice.finish_reason)
            if self._num_open:
                yield chunk
            elif self._with_usage:
                yield chunk
                yield {**self._head, "choices": [], **self.sums()}
            else:
                yield chunk | {"outrider": self.sums()["outrider"]}

    def _chunk(self, choice: Choice, delta: Any, finish_reason: str | None = None) -> Chunk:
        chunk = {**self._head, "choices": [self._entry(choice, delta, finish_reason)]}
        return chunk | {"usage": None} if self._with_usage else chunk

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The entry of `choices` in the whole answer."""

    @abstractmethod
    def _deltas(self, choice: Choice, events: Sequence[Event]) -> Iterator[tuple[Any, Sequence[Event]]]:
        """What these events add, in as few chunks as may be, and the events of each."""

    @abstractmethod
    def _entry(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        """The entry of `choices` in a chunk."""


class ChatAnswer(_TextAnswer):
    """The answer to one chat request."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: ClassVar = {}

    def first(self) -> Iterator[Chunk]:
        for choice in self.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice) if self.plan.has_logprobs else None,
        }

    def _deltas(self, choice: Choice, events: Sequence[Event]) -> Iterator[tuple[Any, Sequence[Event]]]:
        """In the order of the events, neighbours of one kind in one."""
        for kind, group in groupby(events, type):
            found = list(group)
            if kind in _FIELDS:
                yield {_FIELDS[kind]: _text(found)}, found
            else:
                yield {"tool_calls": [_call_delta(choice, event) for event in found]}, found

    def _entry(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(choice) if choice.scored else None
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        return {"content": choice.take_logprobs(), "refusal": None}


_FIELDS: dict[type, str] = {ContentDelta: "content", ReasoningDelta: "reasoning_content"}


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if not isinstance(event, ToolCallStart))


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_delta(choice: Choice, event: Event) -> dict[str, Any]:
    if isinstance(event, ToolCallStart):
        return {"index": event.index, **_call(choice.calls[event.index].id, event.name, "")}
    assert isinstance(event, ToolArgumentsDelta)
    return {"index": event.index, "function": {"arguments": event.text}}


class CompletionAnswer(_TextAnswer):
    """The answer to one request for completions."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    nothing = ""

    def __init__(self, service: Service, body: CompletionRequest, plan: GenerationPlan) -> None:
        super().__init__(service, body, plan)
        self._logprobs = [_Logprobs(service.vocabulary, len(echo)) for echo in plan.echoes]

    def first(self) -> Iterator[Chunk]:
        for choice, echo in zip(self.choices, self.plan.echoes, strict=True):
            if echo:
                yield self._chunk(choice, echo)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice, self.plan.echoes[choice.index] + choice.content, choice.finish_reason)

    def _deltas(self, choice: Choice, events: Sequence[Event]) -> Iterator[tuple[Any, Sequence[Event]]]:
        del choice
        if events:
            yield _text(events), events

    def _entry(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        scored = choice.take_scored()
        logprobs = self._logprobs[choice.index].of(scored) if scored else None
        return {"index": choice.index, "text": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class _Logprobs:
    """A completion's `logprobs`; its text has `position` characters so far."""

    def __init__(self, vocabulary: Vocabulary, position: int) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = position

    def of(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Those of the tokens that come next."""
        offsets = []
        for one in scored:
            offsets.append(self._position)
            self._position += len(self._decoder.decode(self._vocabulary.piece(one.token)))
        return {
            "tokens": [self._name(one.token) for one in scored],
            "token_logprobs": [finite(one.logprob) for one in scored],
            "top_logprobs": [self._top(one) for one in scored],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        names = {self._name(token): finite(logprob) for token, logprob in reversed(one.top)}
        return dict(reversed(names.items()))

    def _name(self, token: int) -> str:
        spelled = spelling_of(token, self._vocabulary)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # as OpenAI spells a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
