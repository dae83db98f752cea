"""OpenAI's responses: a conversation as items, which becomes a request for a chat. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from pydantic import Field, Tag, model_validator
from starlette.responses import Response

from outrider.core.data import Piece
from outrider.server.apis import shapes
from outrider.server.apis.answers import PartedAnswer, answer, logprobs_of
from outrider.server.apis.chat import ChatRequest, plan_chat
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import Json, Many, Shape, text_of
from outrider.server.errors import Problem, renamed_fields
from outrider.server.service import Service

router = APIRouter(tags=["text"])


class FunctionTool(shapes.Function):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    type: Literal["function"]


class Part(Shape):
    """A part of a message: text. Images, audio and files are not supported."""

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: list[Any] | None = None


class ReasoningText(Shape):
    """What the assistant thought."""

    type: Literal["reasoning_text"]
    text: str


class _Item(Shape):
    @model_validator(mode="after")
    def _is_whole(self) -> _Item:
        item: Any = self
        if item.type == "message":
            shapes.says_something(item.role, item.content)
        return self


if TYPE_CHECKING:
    Item = Any
else:
    # Of reasoning, neither a summary is read nor what only another server can decrypt.
    Item = shapes.variants(
        _Item,
        "messages, function calls, their outputs and reasoning",
        message={
            "role": Literal["system", "developer", "user", "assistant"],
            "content": str | Many[Part] | None,
            "phase": Literal["commentary", "final_answer"] | None,
        },
        function_call={"call_id": str, "name": shapes.Text, "arguments": str},
        function_call_output={"call_id": str, "output": str | Many[Part]},
        reasoning={"content": Many[ReasoningText] | None, "encrypted_content": str | None},
    )


class SchemaFormat(shapes.NamedSchema):
    """JSON of a schema; `strict` as in chat completions."""

    type: Literal["json_schema"]


class TextConfig(Shape):
    """What the text of the answer has to be."""

    format: (
        Annotated[shapes.TextFormat | shapes.JsonObjectFormat | SchemaFormat, Field(discriminator="type")]
        | None
    ) = None


class Reasoning(Shape):
    """How much the model is to think, where its template knows that."""

    effort: shapes.Effort | None = None


class ResponseRequest(shapes.GenerationRequest, shapes.ReasoningFields):
    """A conversation to be continued, as items."""

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: shapes.MaxTokens | None = None
    metadata: Json | None = None
    tools: (
        shapes.ToolsOf[
            Annotated[Annotated[FunctionTool, Tag("own")] | shapes.Other, shapes.own_or_other("function")]
        ]
        | None
    ) = None
    tool_choice: shapes.ToolMode | FunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """reasoning is never encrypted: it is given as it is"""
    top_logprobs: shapes.NumLogprobs | None = None
    background: Literal[False] | None = None


@router.post("/v1/responses")
async def responses(body: ResponseRequest, request: Request) -> Response:
    """Continue a conversation; with `stream`, as typed events. Nothing is stored."""
    return await answer(request, body, plan_response, ResponseAnswer)


# The plan

_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of a chat request are called here."""


def plan_response(service: Service, body: ResponseRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    with renamed_fields(_NAMES):
        return plan_chat(service, as_chat(body), namespace)


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The same request as one for a chat completion."""
    wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    form: Any = body.text.format if body.text else None
    if isinstance(form, SchemaFormat):
        form = shapes.json_schema_format(form.json_schema, name=form.name, strict=form.strict)
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionTool):
        choice = shapes.function_tool(name=choice.name)
    return ChatRequest.of(
        **body.sampling(),
        model=body.model,
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        tools=[
            shapes.function_tool(**tool.model_dump(exclude={"type"}))
            for tool in shapes.served_tools(body.tools)
        ],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=form,
        reasoning_budget=body.reasoning_budget,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def _messages(body: ResponseRequest) -> list[Json]:
    """The items as messages: what the assistant thought, said and called in one turn is one message."""
    turns: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for item in body.input:
        if item.type == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif item.type == "message" and item.role != "assistant":
            turns.append({"role": item.role, "content": text_of(item.content)})
        elif item.type != "reasoning" or item.content:
            _add_to_assistant(turns, item)
    return turns


def _add_to_assistant(turns: list[Json], item: Item) -> None:
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if turn is None or (turn["content"] and item.type != "function_call"):
        turn = {"role": "assistant", "content": ""}
        turns.append(turn)
    if item.type == "function_call":
        call = shapes.tool_call(item.call_id, item.name, item.arguments)
        turn.setdefault("tool_calls", []).append(call)
    elif item.type == "message":
        turn["content"] = text_of(item.content)
    else:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text_of(item.content)


# The answer

_TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseAnswer(PartedAnswer):
    """The answer to one request for a response, in items."""

    types: ClassVar = {"content": "message", "reasoning": "reasoning", "call": "function_call"}

    def __init__(self, service: Service, body: ResponseRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._num_events = 0
        self._head = _head(f"resp_{self.id}", service, body, plan)

    def first(self) -> Iterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._head)

    def _end(self) -> Iterator[Json]:
        yield from self._close(self._status)
        yield self._event(f"response.{self._status}", response=self._whole())

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _whole(self) -> Json:
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

    def failed(self, problem: Problem, path: str) -> Json:
        error = problem.body_at(path)["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    # The last item

    def _item_event(self, kind: str, **fields: Any) -> Json:
        item = self._parts[-1]
        place = {"item_id": item["id"], "output_index": len(self._parts) - 1}
        return self._event(kind, **place, **({"content_index": 0} if "content" in item else {}), **fields)

    def _whole_item_event(self, kind: str) -> Json:
        """An event with a copy of the last item, which goes on growing."""
        item = dict(self._parts[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return self._event(kind, output_index=len(self._parts) - 1, item=item)

    def _open(self, kind: str, piece: Piece) -> Iterator[Json]:
        item: Json = {"id": f"{_PREFIXES[kind]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
        self._parts.append(item)
        self._is_open = True
        part: Json = {"type": "reasoning_text", "text": ""}
        if piece.name:
            item |= {"call_id": self._choice.calls[piece.call].id, "name": piece.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"summary": [], "content": []}
        yield self._whole_item_event("response.output_item.added")
        if not piece.name:
            item["content"].append(part)
            yield self._item_event("response.content_part.added", part=dict(part))

    def _grow(self, piece: Piece) -> Json:
        item, more = self._parts[-1], dict[str, Any]()
        if piece.kind == "call":
            item["arguments"] += piece.text
        else:
            part = item["content"][0]
            part["text"] += piece.text
        if piece.kind == "content":
            more = {"logprobs": logprobs_of([piece], self.service)}
            part["logprobs"] += more["logprobs"]
            if self.plan.show_sources:
                more["outrider"] = self._choice.progress([piece])
        return self._item_event(f"{_TEXT_EVENTS[item['type']]}.delta", delta=piece.text, **more)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """Finish the last item: "completed", or "incomplete" where the answer breaks off in it."""
        if not self._is_open:
            return
        self._is_open, item = False, self._parts[-1]
        item["status"] = status
        whole = item if item["type"] == "function_call" else dict(item["content"][0])
        said = {name: whole[name] for name in ("name", "arguments", "text", "logprobs") if name in whole}
        yield self._item_event(f"{_TEXT_EVENTS[item['type']]}.done", **said)
        if whole is not item:
            yield self._item_event("response.content_part.done", part=whole)
        yield self._whole_item_event("response.output_item.done")


def _usage(usage: Json) -> Json:
    details = usage["completion_tokens_details"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {name: count for name, count in details.items() if name != "audio_tokens"},
        "total_tokens": usage["total_tokens"],
    }


def _head(id: str, service: Service, body: ResponseRequest, plan: GenerationPlan) -> Json:
    """What is known before the first token: the request's settings, as they are in force."""
    given = body.model_dump(mode="json", by_alias=True)
    request, choice = plan.requests[0], body.tool_choice or ("auto" if body.tools else "none")
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "previous_response_id", "usage")),
        "instructions": body.instructions,
        "max_output_tokens": request.max_tokens,
        "metadata": body.metadata or {},
        "model": service.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice.name},
        "tools": [tool for tool in given["tools"] or () if tool["type"] == "function"],
        "top_p": request.sampling.top_p,
    }
