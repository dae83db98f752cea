"""Messages as Anthropic's API has them: the whole object, and the typed events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from outrider.server.answers.choice import PartedAnswer, parsed_arguments
from outrider.server.errors import anthropic_error
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.anthropic import MessagesRequest
from outrider.server.service import Service

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageAnswer(PartedAnswer):
    """The answer to one request for a message, in blocks."""

    kinds: ClassVar = {ContentDelta: "text", ReasoningDelta: "thinking"}
    call_kind = "tool_use"

    def __init__(self, service: Service, body: MessagesRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._arguments = ""
        """JSON text of the last block, a call"""
        self._head: dict[str, Any] = {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": body.model or service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self._choice.request.prompt), 0, 0),
        }

    def first(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._head}
        yield {"type": "ping"}

    def whole(self) -> dict[str, Any]:
        return self._head | self._stop | {"content": self._parts} | self._sums()

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        return anthropic_error(500, body)

    @property
    def _stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        reason, stop = _STOP_REASONS[self._choice.finish_reason], self._choice.completion.stop
        if reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _sums(self) -> dict[str, Any]:
        sums = self.sums()
        usage = sums["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return sums | {"usage": _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])}

    def _open(self, kind: str, event: Event) -> Iterator[dict[str, Any]]:
        block: dict[str, Any] = {"type": kind}
        if isinstance(event, ToolCallStart):
            block |= {"id": self._choice.calls[event.index].id, "name": event.name, "input": {}}
        else:
            block |= {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        self._parts.append(block)
        self._is_open, self._arguments = True, ""
        yield self._event("content_block_start", content_block=dict(block))

    def _grow(self, event: ContentDelta | ReasoningDelta | ToolArgumentsDelta) -> dict[str, Any]:
        block = self._parts[-1]
        delta, name = _DELTAS[block["type"]]
        if block["type"] == "tool_use":
            self._arguments += event.text
        else:
            block[name] += event.text
        return self._event("content_block_delta", delta={"type": delta, name: event.text})

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open, block = False, self._parts[-1]
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments(self._arguments)
        elif block["type"] == "thinking":
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("content_block_stop")

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._stop, **self._sums()}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._parts) - 1, **fields}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Tokens of a prompt that were read and those that were kept are counted apart there."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
