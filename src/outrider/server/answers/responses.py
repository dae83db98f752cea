"""Responses: the whole object, and the typed events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from outrider.core.data import Update
from outrider.formats import ContentDelta
from outrider.server.answers.account import account_of, usage_of
from outrider.server.answers.choice import Choice
from outrider.server.answers.items import Items, Told
from outrider.server.answers.logprobs import chat_entries, shown
from outrider.server.prepare.plan import Plan
from outrider.server.service import Service
from outrider.server.shapes.responses import ResponseRequest

__all__ = ["ResponseAnswer"]


class ResponseAnswer:
    """The answer to one request for a response. Read it as events; `whole` is what they come to."""

    def __init__(self, service: Service, asked: ResponseRequest, plan: Plan, choice: Choice) -> None:
        self.service = service
        self.plan = plan
        self.choice = choice
        self._items = Items()
        self._num_told = 0
        self._head = _head(service, asked, plan)

    def first(self) -> Iterator[dict[str, Any]]:
        """The events before any text."""
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered((kind, {"response": self._head | {"status": "in_progress", "output": []}}))

    def next(self, update: Update | None) -> Iterator[dict[str, Any]]:
        """The events of an update; None: the generation has ended."""
        for event in self.choice.take(update):
            is_content = isinstance(event, ContentDelta)
            scored = self._take_scored() if is_content else []
            for told in self._items.take(event, self.choice.calls, scored):
                found = self._numbered(told)
                if self.plan.show_sources and found["type"] == "response.output_text.delta" and is_content:
                    found["outrider"] = self.choice.told([event])
                yield found
        if update is None:
            yield from self._end()

    def _take_scored(self) -> list[dict[str, Any]]:
        vocabulary = self.service.vocabulary
        visible = self.plan.requests[0].visible
        return chat_entries(shown(self.choice.take_scored(), vocabulary, visible), vocabulary)

    def _end(self) -> Iterator[dict[str, Any]]:
        status = self._status
        for told in self._items.close(status):
            yield self._numbered(told)
        yield self._numbered((f"response.{status}", {"response": self.whole()}))

    @property
    def _status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def whole(self) -> dict[str, Any]:
        """The response when the generation has ended and every event was read."""
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
        """The event that ends a stream which cannot go on; `body` is an error's."""
        error = body["error"]
        said = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._numbered(("error", said))

    def _numbered(self, told: Told) -> dict[str, Any]:
        kind, said = told
        self._num_told += 1
        return {"type": kind, "sequence_number": self._num_told - 1, **said}


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


def _head(service: Service, asked: ResponseRequest, plan: Plan) -> dict[str, Any]:
    """What is known before the first token: the request, as it is carried out."""
    told = asked.model_dump(mode="json", by_alias=True)
    request = plan.requests[0]
    text = told["text"] or {}
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": told["tool_choice"] or ("auto" if asked.tools else "none"),
        "tools": told["tools"] or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }
