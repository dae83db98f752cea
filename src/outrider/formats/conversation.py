"""Conversations with tools, in the form that a template expects."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outrider.core.errors import PromptError
from outrider.core.files import parse_json

Message = dict[str, Any]


def tool_entry(tool: ToolSpec) -> dict[str, Any]:
    """A tool as templates list it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with text as content, developers as the system, the arguments of calls as objects, and
    with the name of the tool in its results. Raises PromptError for what is none of that."""
    names: dict[str, str] = {}
    plain = []
    for i, given in enumerate(messages):
        message = {**given, "content": _text(f"messages[{i}].content", given.get("content"))}
        if message.get("role") == "developer":
            message["role"] = "system"
        if message.get("tool_calls"):
            place = f"messages[{i}].tool_calls"
            calls = [_call(f"{place}[{j}]", call) for j, call in enumerate(message["tool_calls"])]
            message["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        else:
            message.pop("tool_calls", None)
        if message.get("role") == "tool" and (name := names.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)
        plain.append(message)
    return plain


def _text(place: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise PromptError(place, "it holds something that is not text", "Send text alone.")
    return "\n".join(str(text) for text in texts)


def _call(place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(place, "it names no function", 'Give {"function": {"name": …, "arguments": …}}.')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise PromptError(f"{place}.function.arguments", "it is not a JSON object", "Send it as it came.")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def adapt(
    messages: Sequence[Message], *, reasoning: str, argument_texts: bool = False, short_ids: bool = False
) -> None:
    """Change messages in place to what a template expects.

    Args:
        messages: As `plain_messages` made them.
        reasoning: Its name of what was thought in an earlier turn.
        argument_texts: Whether it puts in the arguments of calls as they are: they have to be JSON text.
        short_ids: Whether ids of calls and results are nine letters and digits, as Mistral demands.
    """
    for message in messages:
        if "reasoning_content" in message:
            message[reasoning] = message.pop("reasoning_content")
        for call in message.get("tool_calls", ()):
            if argument_texts:
                text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"]["arguments"] = text
            if short_ids:
                call["id"] = _short(call["id"])
        if short_ids and message.get("role") == "tool":
            message["tool_call_id"] = _short(str(message.get("tool_call_id", "")))


def _short(given: str) -> str:
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return base64.b32encode(hashlib.sha256(given.encode()).digest())[:9].decode()


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message for each call, followed by its result, for templates that take no more."""
    split: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            asked = message.get("tool_call_id")
            if call := next((one for one in waiting if one["tool_calls"][0]["id"] == asked), None):
                waiting.remove(call)
                split.append(call)
            split.append(message)
            continue
        split += waiting
        waiting = [
            {**message, "content": "" if i else message["content"], "tool_calls": [call]}
            for i, call in enumerate(message.get("tool_calls") or ())
        ]
        split += () if waiting else (message,)
    return split + waiting


def calls_as_text(messages: Sequence[Message], written: Written) -> list[Message]:
    """Calls of earlier turns as text of the assistant."""
    turns = []
    for message in messages:
        calls = [Call(**call["function"]) for call in message.get("tool_calls", ())]
        texts = [message["content"], written(calls) if calls else ""]
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        turns.append({**others, "content": "\n".join(filter(None, texts))})
    return turns


def results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Results of calls as text of the user."""
    turns: list[Message] = []
    was_result = False
    for given in messages:
        is_result = given.get("role") == "tool"
        result = f"Result of {given.get('name', 'the function')}: {given['content']}"
        message = {"role": "user", "content": result} if is_result else dict(given)
        # Templates want users and assistants to take turns.
        if (is_result or was_result) and turns and turns[-1]["role"] == message["role"] == "user":
            message["content"] = f"{turns.pop()['content']}\n\n{message['content']}"
        turns.append(message)
        was_result = is_result
    return turns


def with_guide(
    messages: Sequence[Message], tools: Sequence[ToolSpec], written: Written, *, parallel: bool
) -> list[Message]:
    """The messages with the tools, and how to call them, in the system message."""
    if not tools:
        return list(messages)
    guide = _guide(tools, written, parallel)
    if messages and messages[0]["role"] == "system":
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{guide}"}, *others]
    return [{"role": "system", "content": guide}, *messages]


def _guide(tools: Sequence[ToolSpec], written: Written, parallel: bool) -> str:
    listed = (json.dumps(tool_entry(tool)["function"], ensure_ascii=False) for tool in tools)
    sample = written([Call("<function>", {"<argument>": "<value>"})])
    is_json = sample.startswith("{")
    if is_json:
        sample = sample.replace('{"<argument>": "<value>"}', "{<its arguments>}")
    several = " For several calls, write one such line each." if parallel and is_json else ""
    return "\n".join(
        [
            "You can call these functions:",
            *listed,
            "",
            f"To call one, answer with {'a line that is nothing but a JSON object' if is_json else 'this'}:",
            sample,
            f"Its result is then told to you.{several} If no function is of use, answer in plain text.",
        ]
    )


# What a client says about tools, and what a reader finds in an answer.


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call.

    `parameters` is the JSON schema of its arguments, an object; empty: any object. A schema that cannot be
    enforced is an error where the tool is `strict`; otherwise what can be of it is, and a notice says so.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """The choice of one tool, which has to be called."""

    name: str


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


Written = Callable[[Sequence[Call]], str]
"""How a model writes calls."""

ToolChoice = Literal["none", "auto", "required"] | Named


class ReasoningMarkers(NamedTuple):
    """How reasoning begins and ends."""

    opener: str
    closer: str
