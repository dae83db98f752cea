"""OpenAI's responses: a conversation as items, which becomes a request for a chat. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Tag, model_validator
from starlette.responses import Response

from outrider.core.data import Kind, Piece
from outrider.server.apis import shapes
from outrider.server.apis.answers import AnswerPart, PartedAnswer, answer, logprobs_of
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


@renamed_fields(_NAMES)
def plan_response(service: Service, body: ResponseRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
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

_ITEMS: dict[Kind, tuple[str, str, str]] = {
    "content": ("message", "msg", "response.output_text"),
    "reasoning": ("reasoning", "rs", "response.reasoning_text"),
    "call": ("function_call", "fc", "response.function_call_arguments"),
}
"""Their types, the beginnings of their ids, and of the events of their text."""


class ResponseAnswer(PartedAnswer):
    """The answer to one request for a response, in items."""

    def __init__(self, service: Service, body: ResponseRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._num_events = 0
        self._head = _head(f"resp_{self.id}", service, body, plan)

    def first(self) -> Iterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._head)

    def failed(self, problem: Problem, path: str) -> Json:
        error = problem.body_at(path)["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _end(self) -> Iterator[Json]:
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
            "output": [self._item(part) for part in self._parts],
            "usage": _usage(sums["usage"]),
            "outrider": sums["outrider"],
        }

    def _item(self, part: AnswerPart, *, begins: bool = False) -> Json:
        is_last = self._choice.is_over and part is self._parts[-1]
        kind, prefix, _ = _ITEMS[part.kind]
        status = "in_progress" if begins else self._status if is_last else "completed"
        item: Json = {"id": f"{prefix}_{part.id}", "type": kind, "status": status}
        if part.call is not None:
            return item | {"call_id": part.call.id, "name": part.call.name, "arguments": part.text}
        content = [] if begins else [_content(part)]
        more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        return item | more | {"content": content}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _text_event(self, kind: str, of: AnswerPart, **fields: Any) -> Json:
        place = {"item_id": f"{_ITEMS[of.kind][1]}_{of.id}", "output_index": of.index}
        return self._event(kind, **place, **({} if of.call else {"content_index": 0}), **fields)

    def _opened(self, part: AnswerPart) -> Iterator[Json]:
        item = self._item(part, begins=True)
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if part.call is None:
            yield self._text_event("response.content_part.added", part, part=_content(part))

    def _grown(self, part: AnswerPart, piece: Piece) -> Json:
        more: Json = {}
        if piece.kind == "content":
            more["logprobs"] = logprobs_of([piece], self.service)
            part.logprobs += more["logprobs"]
            if self.plan.show_sources:
                more["outrider"] = self._choice.progress([piece])
        return self._text_event(f"{_ITEMS[part.kind][2]}.delta", part, delta=piece.text, **more)

    def _closed(self, part: AnswerPart) -> Iterator[Json]:
        text, done = _content(part), f"{_ITEMS[part.kind][2]}.done"
        if part.call is not None:
            yield self._text_event(done, part, name=part.call.name, arguments=part.text)
        else:
            said = {name: text[name] for name in ("text", "logprobs") if name in text}
            yield self._text_event(done, part, **said)
            yield self._text_event("response.content_part.done", part, part=text)
        item = self._item(part)
        yield self._event("response.output_item.done", output_index=part.index, item=item)


def _content(part: AnswerPart) -> Json:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": [*part.logprobs]}


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
