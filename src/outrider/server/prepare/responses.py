"""A request for a response as a chat request: the items become messages, and the rest is one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.server.prepare.chat import plan_chat
from outrider.server.prepare.plan import Plan
from outrider.server.problems import Problem
from outrider.server.service import Service
from outrider.server.shapes.chat import ChatRequest
from outrider.server.shapes.grammars import JsonObjectFormat, JsonSchemaFormat, NamedSchema, TextFormat
from outrider.server.shapes.items import FunctionCallItem, FunctionOutputItem, Item, MessageItem, joined
from outrider.server.shapes.messages import CalledFunction, Message, ToolCall
from outrider.server.shapes.responses import NamedFunctionTool, ResponseRequest, SchemaFormat
from outrider.server.shapes.sampling import SamplingFields
from outrider.server.shapes.tools import Function, NamedFunction, NamedTool, Tool

__all__ = ["as_chat", "plan_response"]

_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""What the fields of a chat request are called here."""


def plan_response(service: Service, asked: ResponseRequest, scope: str) -> Plan:
    """The request that is asked for. Raises Problem, in terms of this endpoint's fields."""
    try:
        return plan_chat(service, as_chat(asked), scope)
    except Problem as error:
        param = error.param or ""
        name = next((name for name in _NAMES if param.split(".")[0].split("[")[0] == name), None)
        if name is None:
            raise
        renamed = param.replace(name, _NAMES[name], 1)
        message = error.message.replace(name, _NAMES[name], 1)
        raise Problem(error.status, message, code=error.code, type=error.type, param=renamed) from None


def as_chat(asked: ResponseRequest) -> ChatRequest:
    """The same request as one for a chat completion."""
    shared = {name: getattr(asked, name) for name in SamplingFields.model_fields}
    wants_logprobs = "message.output_text.logprobs" in (asked.include or ()) or bool(asked.top_logprobs)
    return ChatRequest(
        **shared,
        model=asked.model,
        messages=_messages(asked),
        max_completion_tokens=asked.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=asked.top_logprobs if wants_logprobs else None,
        tools=_tools(asked),
        tool_choice=_choice(asked),
        parallel_tool_calls=asked.parallel_tool_calls,
        response_format=_format(asked),
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
    )


def _tools(asked: ResponseRequest) -> list[Tool]:
    return [
        Tool(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in asked.tools or ()
    ]


def _choice(asked: ResponseRequest) -> Any:
    if isinstance(asked.tool_choice, NamedFunctionTool):
        return NamedTool(type="function", function=NamedFunction(name=asked.tool_choice.name))
    return asked.tool_choice


def _format(asked: ResponseRequest) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    found = asked.text.format if asked.text else None
    if not isinstance(found, SchemaFormat):
        return found
    named = NamedSchema(name=found.name, schema=found.json_schema, strict=found.strict)
    return JsonSchemaFormat(type="json_schema", json_schema=named)


def _messages(asked: ResponseRequest) -> list[Message]:
    lead = [Message(role="system", content=asked.instructions)] if asked.instructions else []
    if isinstance(asked.input, str):
        return [*lead, Message(role="user", content=asked.input)]
    return [*lead, *_turns(asked.input)]


def _turns(items: Sequence[Item]) -> list[Message]:
    """Messages; what the assistant thought, said and called in one turn is one of them."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            turns.append({"role": item.role, "content": joined(item.content)})
        elif isinstance(item, FunctionOutputItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
        else:
            _add_to_assistant(turns, item)
    return [Message(**turn) for turn in turns]


def _add_to_assistant(turns: list[dict[str, Any]], item: Item) -> None:
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if turn is None or (turn["content"] and not isinstance(item, FunctionCallItem)):
        turn = {"role": "assistant", "content": ""}
        turns.append(turn)
    if isinstance(item, FunctionCallItem):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
    elif isinstance(item, MessageItem):
        turn["content"] = joined(item.content)
    else:
        turn["reasoning_content"] = "".join(part.text for part in item.content or ()) or None  # type: ignore[union-attr]
