"""Responses: the whole object, its output items, and the typed events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar
from uuid import uuid4

from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from outrider.server.answers.choice import PartedAnswer
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.requests import ResponseRequest
from outrider.server.service import Service

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_GIVEN = ("instructions", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
"""Fields of the request that are returned as they came."""


class ResponseAnswer(PartedAnswer):
    """The answer to one request for a response, in items."""

    kinds: ClassVar = {ContentDelta: "message", ReasoningDelta: "reasoning"}
    call_kind = "function_call"

    def __init__(self, service: Service, body: ResponseRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._num_events = 0
        self._head = _head(f"resp_{self.id}", service, body, plan)

    def first(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._head)

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._close(self._status)
        yield self._event(f"response.{self._status}", response=self.whole())

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def whole(self) -> dict[str, Any]:
        sums = self.sums()
        is_cut = self._status == "incomplete"
        return self._head | {
            "status": self._status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._parts,
            "usage": _usage(sums["usage"]),
            "outrider": sums["outrider"],
        }

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        error = body["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    # The last item

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about a part of it."""
        item, index = self._parts[-1], len(self._parts) - 1
        place = {"item_id": item["id"], "output_index": index}
        return self._event(kind, **place, **({"content_index": 0} if "content" in item else {}), **fields)

    def _whole_item_event(self, kind: str) -> dict[str, Any]:
        """An event with all of it as it is now: it goes on growing."""
        item = dict(self._parts[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return self._event(kind, output_index=len(self._parts) - 1, item=item)

    def _open(self, kind: str, event: Event) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{uuid4().hex}",
            "type": kind,
            "status": "in_progress",
        }
        self._parts.append(item)
        self._is_open = True
        if isinstance(event, ToolCallStart):
            item |= {"call_id": self._choice.calls[event.index].id, "name": event.name, "arguments": ""}
            yield self._whole_item_event("response.output_item.added")
            return
        if kind == "message":
            item |= {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        yield self._whole_item_event("response.output_item.added")
        item["content"].append(part)
        yield self._item_event("response.content_part.added", part=dict(part))

    def _grow(self, event: ContentDelta | ReasoningDelta | ToolArgumentsDelta) -> dict[str, Any]:
        item, more = self._parts[-1], dict[str, Any]()
        if item["type"] == "function_call":
            item["arguments"] += event.text
        else:
            part = item["content"][0]
            part["text"] += event.text
        if item["type"] == "message":
            more = {"logprobs": self._choice.take_logprobs()}
            part["logprobs"] += more["logprobs"]
            if self.plan.show_sources:
                more["outrider"] = self._choice.progress([event])
        return self._item_event(f"{_TEXT_EVENTS[item['type']]}.delta", delta=event.text, **more)

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """It is finished: "completed", or "incomplete" where the answer breaks off in it."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._parts[-1]
        item["status"] = status
        kind = f"{_TEXT_EVENTS[item['type']]}.done"
        if item["type"] == "function_call":
            yield self._item_event(kind, name=item["name"], arguments=item["arguments"])
        else:
            part = dict(item["content"][0])
            yield self._item_event(
                kind, **{name: part[name] for name in ("text", "logprobs") if name in part}
            )
            yield self._item_event("response.content_part.done", part=part)
        yield self._whole_item_event("response.output_item.done")


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage["completion_tokens_details"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {name: count for name, count in details.items() if name != "audio_tokens"},
        "total_tokens": usage["total_tokens"],
    }


def _head(id: str, service: Service, body: ResponseRequest, plan: GenerationPlan) -> dict[str, Any]:
    """What is known before the first token: the request, as it is carried out."""
    given = body.model_dump(mode="json", by_alias=True)
    request = plan.requests[0]
    text = given["text"] or {}
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        **{name: given[name] for name in _GIVEN},
        "max_output_tokens": request.max_tokens,
        "metadata": body.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": given["tool_choice"] or ("auto" if body.tools else "none"),
        "tools": given["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
