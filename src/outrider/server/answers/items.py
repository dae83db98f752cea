"""The output of a response, item by item, and the events that tell of it as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolCallStart
from outrider.server.answers.choice import ToolCall

__all__ = ["Items"]

Told = tuple[str, dict[str, Any]]
"""The type of an event and what it says, without its sequence number."""

Scored = list[dict[str, Any]]


class Items:
    """The items of one response. Each is opened, grows and is closed before the next one is opened."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def take(self, event: Event, calls: Sequence[ToolCall], scored: Scored) -> Iterator[Told]:
        """What is told of an event; `calls` are those of the answer so far, `scored` the log
        probabilities that belong to it."""
        kind = _KINDS.get(type(event), "function_call")
        if self._open is None or self._open["type"] != kind or isinstance(event, ToolCallStart):
            yield from self.close("completed")
            yield from self._begin(kind, calls[event.index] if isinstance(event, ToolCallStart) else None)
        if not isinstance(event, ToolCallStart):
            yield from self._grow(event.text, scored)

    def _begin(self, kind: str, call: ToolCall | None) -> Iterator[Told]:
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{uuid4().hex}",
            "type": kind,
            "status": "in_progress",
        }
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._open = item
        self.output.append(item)
        yield "response.output_item.added", {"output_index": self._index, "item": _copy(item)}
        if kind != "function_call":
            part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _text_part()
            item["content"].append(part)
            yield "response.content_part.added", self._place | {"content_index": 0, "part": dict(part)}

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._index}

    def _grow(self, text: str, scored: Scored) -> Iterator[Told]:
        item = self.output[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            yield "response.function_call_arguments.delta", self._place | {"delta": text}
            return
        part = item["content"][0]
        part["text"] += text
        place = self._place | {"content_index": 0, "delta": text}
        if item["type"] == "reasoning":
            yield "response.reasoning_text.delta", place
        else:
            part["logprobs"] += scored
            yield "response.output_text.delta", place | {"logprobs": scored}

    def close(self, status: str) -> Iterator[Told]:
        """The open item is finished: "completed", or "incomplete" where the answer breaks off in it."""
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", self._place | done
        else:
            part = item["content"][0]
            place = self._place | {"content_index": 0}
            if item["type"] == "reasoning":
                yield "response.reasoning_text.done", place | {"text": part["text"]}
            else:
                done = {"text": part["text"], "logprobs": list(part["logprobs"])}
                yield "response.output_text.done", place | done
            yield "response.content_part.done", place | {"part": dict(part)}
        yield "response.output_item.done", {"output_index": self._index, "item": _copy(item)}


_KINDS: dict[type, str] = {ContentDelta: "message", ReasoningDelta: "reasoning"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now: it goes on growing."""
    if "content" not in item:
        return dict(item)
    return item | {"content": [dict(part) for part in item["content"]]}
