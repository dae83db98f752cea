"""Responses: the whole object, its output items, and the typed events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from outrider.core.data import Update
from outrider.formats import ContentDelta, Event, ReasoningDelta, ToolCallStart
from outrider.server.answers.choice import Answer, Choice, account_of, chat_logprobs, usage_of
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.requests import ResponseRequest
from outrider.server.service import Service

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event and its fields, without its sequence number."""

_KINDS: dict[type, str] = {ContentDelta: "message", ReasoningDelta: "reasoning"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseAnswer(Answer):
    """The answer to one request for a response, whole or as events; both come of the same items."""

    done = ""
    """its stream ends with the last event"""

    def __init__(
        self, service: Service, body: ResponseRequest, plan: GenerationPlan, choices: Sequence[Choice]
    ) -> None:
        self.service = service
        self.plan = plan
        [self.choice] = choices
        self._items = _Items()
        self._num_events = 0
        self._head = _head(service, body, plan)

    def take(self, choice: Choice, update: Update | None) -> None:
        for _ in self.next(choice, update):
            pass

    def first(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered(kind, {"response": self._head | {"status": "in_progress", "output": []}})

    def next(self, choice: Choice, update: Update | None) -> Iterator[dict[str, Any]]:
        for event in choice.take(update):
            is_content = isinstance(event, ContentDelta)
            scored = self._take_scored() if is_content else []
            for kind, fields in self._items.add(event, choice, scored):
                if self.plan.show_sources and kind == "response.output_text.delta" and is_content:
                    fields["outrider"] = choice.progress([event])
                yield self._numbered(kind, fields)
        if update is None:
            for kind, fields in self._items.close(self._status):
                yield self._numbered(kind, fields)
            yield self._numbered(f"response.{self._status}", {"response": self.whole()})

    def _take_scored(self) -> list[dict[str, Any]]:
        vocabulary = self.service.vocabulary
        return chat_logprobs(self.choice.take_scored(vocabulary, self.plan.requests[0].visible), vocabulary)

    @property
    def _status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def whole(self) -> dict[str, Any]:
        jobs = [self.choice.job]
        usage = usage_of(self.plan, jobs, self.service.count_tokens(self.choice.reasoning))
        is_cut = self._status == "incomplete"
        return self._head | {
            "status": self._status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items.output,
            "usage": _usage(usage),
            "outrider": account_of(self.plan, jobs, self.service.policy),
        }

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        error = body["error"]
        return self._numbered("error", {name: error[name] for name in ("code", "message", "param")})

    def _numbered(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


class _Items:
    """The output items of one response. Each is opened, grows and is closed before the next is opened."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, event: Event, choice: Choice, scored: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        """The events that tell of it; `scored` are the log probabilities that belong to it."""
        kind = _KINDS.get(type(event), "function_call")
        if self._open is None or self._open["type"] != kind or isinstance(event, ToolCallStart):
            yield from self.close("completed")
            yield from self._begin(kind, event, choice)
        if not isinstance(event, ToolCallStart):
            yield from self._grow(event.text, scored)

    def _begin(self, kind: str, event: Event, choice: Choice) -> Iterator[ItemEvent]:
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{uuid4().hex}",
            "type": kind,
            "status": "in_progress",
        }
        part: dict[str, Any] | None = None
        if isinstance(event, ToolCallStart):
            call = choice.calls[event.index]
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item
        self.output.append(item)
        yield "response.output_item.added", self._snapshot()
        if part is not None:
            item["content"].append(part)
            yield "response.content_part.added", self._place | {"content_index": 0, "part": dict(part)}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def _snapshot(self) -> dict[str, Any]:
        """The last item as it is now: it goes on growing."""
        item = dict(self.output[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"output_index": len(self.output) - 1, "item": item}

    def _grow(self, text: str, scored: list[dict[str, Any]]) -> Iterator[ItemEvent]:
        item = self.output[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            yield "response.function_call_arguments.delta", self._place | {"delta": text}
            return
        part = item["content"][0]
        part["text"] += text
        fields = self._place | {"content_index": 0, "delta": text}
        if item["type"] == "message":
            part["logprobs"] += scored
            fields["logprobs"] = scored
        yield f"{_TEXT_EVENTS[item['type']]}.delta", fields

    def close(self, status: str) -> Iterator[ItemEvent]:
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
            done = {"text": part["text"]}
            if item["type"] == "message":
                done["logprobs"] = list(part["logprobs"])
            yield f"{_TEXT_EVENTS[item['type']]}.done", place | done
            yield "response.content_part.done", place | {"part": dict(part)}
        yield "response.output_item.done", self._snapshot()


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage["completion_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {name: count for name, count in details.items() if name != "audio_tokens"},
        "total_tokens": usage["total_tokens"],
    }


def _head(service: Service, body: ResponseRequest, plan: GenerationPlan) -> dict[str, Any]:
    """What is known before the first token: the request, as it is carried out."""
    given = body.model_dump(mode="json", by_alias=True)
    request = plan.requests[0]
    text = given["text"] or {}
    return {
        "id": f"resp_{uuid4().hex}",
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


_GIVEN = ("instructions", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
"""Fields of the request that are returned as they came."""
