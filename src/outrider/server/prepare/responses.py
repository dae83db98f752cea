"""A request for a response as a chat request: the items become messages, and the rest is one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.errors import Problem
from outrider.server.prepare.chat import plan_chat
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.base import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    SamplingFields,
    TextFormat,
)
from outrider.server.protocol.messages import (
    CalledFunction,
    Function,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    Message,
    MessageItem,
    NamedFunction,
    NamedFunctionTool,
    NamedTool,
    ReasoningItem,
    Tool,
    ToolCall,
    text_of,
)
from outrider.server.protocol.requests import ChatRequest, ResponseRequest, SchemaFormat
from outrider.server.service import Service

_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of a chat request are called here."""


def plan_response(service: Service, body: ResponseRequest, namespace: str) -> GenerationPlan:
    """The request that is asked for. Raises Problem, in terms of this endpoint's fields."""
    try:
        return plan_chat(service, as_chat(body), namespace)
    except Problem as error:
        raise error.renamed(_NAMES) from None


def as_chat(body: ResponseRequest) -> ChatRequest:
    """The same request as one for a chat completion."""
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    wants_logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    functions = [Function(**tool.model_dump(exclude={"type"})) for tool in body.tools or ()]
    return ChatRequest(
        **shared,
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        tools=[Tool(type="function", function=function) for function in functions],
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_budget=body.reasoning_budget,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def _choice(body: ResponseRequest) -> Any:
    if isinstance(body.tool_choice, NamedFunctionTool):
        return NamedTool(type="function", function=NamedFunction(name=body.tool_choice.name))
    return body.tool_choice


def _format(body: ResponseRequest) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    found = body.text.format if body.text else None
    if not isinstance(found, SchemaFormat):
        return found
    named = NamedSchema(name=found.name, schema=found.json_schema, strict=found.strict)
    return JsonSchemaFormat(type="json_schema", json_schema=named)


def _messages(body: ResponseRequest) -> list[Message]:
    first = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, Message(role="user", content=body.input)]
    return [*first, *_turns(body.input)]


def _turns(items: Sequence[Item]) -> list[Message]:
    """Messages; what the assistant thought, said and called in one turn is one of them."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, FunctionOutputItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turns.append({"role": item.role, "content": text_of(item.content)})
        else:
            _add_to_assistant(turns, item)
    return [Message(**turn) for turn in turns]


def _add_to_assistant(
    turns: list[dict[str, Any]], item: MessageItem | FunctionCallItem | ReasoningItem
) -> None:
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if turn is None or (turn["content"] and not isinstance(item, FunctionCallItem)):
        turn = {"role": "assistant", "content": ""}
        turns.append(turn)
    if isinstance(item, FunctionCallItem):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
    elif isinstance(item, MessageItem):
        turn["content"] = text_of(item.content)
    else:
        turn["reasoning_content"] = text_of(item.content) or None
