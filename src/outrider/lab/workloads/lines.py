"""One line of a prompt file: Spec-Bench's shape, a chat request's, a text as it is, or a server's log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from outrider.core.data import Grammar
from outrider.core.files import parse_json
from outrider.core.params import grammar_kind
from outrider.lab.prompts import Prompt

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KNOWN = ("messages", "prompt", "text", "turns", "tools", "response_format", "max_tokens", "category")
_ALIKE = 0.85
_OBJECT = {"type": "object"}


class Unreadable(Exception):
    """Why a line holds no prompt; `way_out` where there is a better one than to show the forms."""

    def __init__(self, why: str, way_out: str = "") -> None:
        super().__init__(why)
        self.way_out = way_out


def prompt_of(value: Any, name: str) -> Prompt:
    """The prompt in a line's value; `name` is its id where it has none. Raises Unreadable."""
    if isinstance(value, str):
        raise Unreadable("it is not a JSON object")
    if not isinstance(value, dict):
        kinds = {list: "array", bool: "true or false", int: "number", float: "number"}
        raise Unreadable(f"it is a JSON {kinds.get(type(value), 'null')}, not an object")
    for key in ("question_id", "id"):
        own = value.get(key)
        if isinstance(own, str | int) and not isinstance(own, bool) and own != "":
            name = str(own)
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise Unreadable("its turns are not a list of texts")
        return Prompt(name, ({"role": "user", "content": turns[0]},), follow_ups=tuple(turns[1:]))
    _refuse_slips(value)
    return prompt_of_request(value, name)


def prompt_of_request(body: Mapping[str, Any], name: str) -> Prompt:
    """The prompt that a request of a chat or a completion asks. Raises Unreadable."""
    given: tuple[Mapping[str, Any], ...] | str
    if "messages" in body:
        given, tools = messages_of(body["messages"]), tools_of(body.get("tools"))
    else:
        given, tools = body.get("prompt", body.get("text")), ()
        if not isinstance(given, str) or not given:
            found = ", ".join(map(repr, list(body)[:6])) or "nothing"
            raise Unreadable(f"it holds no prompt but {found}" if given is None else "its prompt is not text")
    limit = max_tokens_of(body.get("max_tokens"))
    return Prompt(name, given, grammar=grammar_of_fields(body), tools=tools, max_tokens=limit)


def _refuse_slips(value: Mapping[str, Any]) -> None:
    """Raise Unreadable for a key that all but spells one of ours: it would do nothing."""
    for key in value:
        near = get_close_matches(key, _KNOWN, 1, _ALIKE)
        if near and near[0] != key:
            raise Unreadable(f"it has no use for {key!r}", f"Did you mean {near[0]!r}?")


def max_tokens_of(value: Any) -> int | None:
    """A limit on the answer. Raises Unreadable for what is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unreadable(f"its max_tokens is {value!r}, not a number of tokens")
    return value


def messages_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's messages with each content as one text. Raises Unreadable."""
    if not isinstance(value, list) or not value:
        raise Unreadable("its messages are not a list")
    return tuple(_message(message, i) for i, message in enumerate(value, 1))


def _message(message: Any, number: int) -> Mapping[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise Unreadable(f"message {number} has no role of {', '.join(_ROLES)}")
    calls, content = message.get("tool_calls"), text_of(message.get("content"))
    if content is None and not calls:
        raise Unreadable(f"message {number} is empty: its content is not text")
    plain = {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if calls:
        plain["tool_calls"] = _calls(calls, number)
    return {"role": "system" if role == "developer" else role, "content": content or "", **plain}


def text_of(content: Any) -> str | None:
    """A content, which may come in parts, as one text; None for what is no text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if texts and len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    found = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(f"message {number} has tool calls without a function's name")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            why = f"message {number} has arguments of a tool that are not text"
            raise Unreadable(why, 'OpenAI\'s are JSON in a string: "{\\"path\\": \\"a.txt\\"}".')
        plain = {"name": function["name"], "arguments": arguments}
        found.append({"id": call.get("id") or f"call_{i}", "type": "function", "function": plain})
    return found


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's tools. Raises Unreadable."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Unreadable("its tools are not a list")
    for number, tool in enumerate(value, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(f"tool {number} is not a function with a name")
    return tuple(value)


def grammar_of_fields(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a body asks for, in any server's field, as `outrider serve` reads it; None where it
    asks for none. Raises Unreadable."""
    nested = body.get("structured_outputs") or {}
    if not isinstance(nested, dict):
        raise Unreadable("its structured_outputs is not an object")
    fields = {name: value for name, value in body.items() if name != "structured_outputs"}
    fields |= {f"guided_{name}": value for name, value in nested.items() if value is not None}
    for name, read in _READ.items():
        if fields.get(name) is not None:
            try:
                return read(fields[name])
            except (AttributeError, KeyError, TypeError, ValueError):
                raise Unreadable(f"its {name} asks for nothing that is known") from None
    return None


def _format(value: Any) -> Grammar | None:
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return _schema(value.get("schema") or _OBJECT)
        case "json_schema":
            named = value["json_schema"]
            return _schema(named["schema"], lenient=named.get("strict") is False)
    raise ValueError


def _schema(value: Any, *, lenient: bool = False) -> Grammar:
    if not isinstance(value, str | dict):
        raise TypeError
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value), lenient=lenient)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _grammar(value: Any) -> Grammar:
    return Grammar(grammar_kind(_string(value)), value)


_READ: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _format,
    "json_schema": _schema,
    "grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": lambda value: Grammar("regex", _string(value)),
    "guided_choice": lambda value: Grammar("choice", json.dumps([_string(part) for part in value])),
    "guided_grammar": _grammar,
    "guided_json_object": lambda _: _schema(_OBJECT),
}


# Requests that a server logged (`outrider serve --log-json --log-prompts`), to be asked again: messages,
# tools, schemas, and their limit on the answer up to the workload's. How it is sampled is the workload's.


def is_event(value: Any) -> bool:
    """Whether a value is a line of the server's log."""
    return isinstance(value, dict) and isinstance(value.get("event"), str) and "level" in value


def prompts_of_event(value: Any, max_tokens: int) -> list[Prompt]:
    """What a line of the log asked for: nothing unless it is a request that was answered.

    Raises Unreadable where it asked for something that cannot be asked again.
    """
    if not is_event(value) or value["event"] != "request" or value.get("status") != 200:
        return []
    read = _ROUTES.get(str(value.get("route", "")).removeprefix("/v1"))
    if read is None or value.get("method") != "POST":
        return []
    if not isinstance(value.get("body"), str):
        raise Unreadable("the body was not logged")
    try:
        body = parse_json(value["body"])
    except (ValueError, RecursionError):
        raise Unreadable("the body is longer than what is logged") from None
    if not isinstance(body, dict):
        raise Unreadable("the body is not an object")
    name = str(value.get("id") or "request")
    found = [prompt_of_request(request, name) for request in read(body)]
    return [replace(p, max_tokens=min(p.max_tokens or max_tokens, max_tokens)) for p in found]


# What each endpoint was asked, as requests that a prompt file could hold.


def _chat(body: dict[str, Any]) -> list[dict[str, Any]]:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    return [{**body, "messages": body.get("messages"), "tools": tools, "max_tokens": limit}]


def _completions(body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = body.get("prompt")
    prompts = asked if isinstance(asked, list) else [asked]
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise Unreadable("the prompt is given in tokens")
    body.pop("messages", None)
    return [{**body, "prompt": prompt} for prompt in prompts]


def _responses(_body: dict[str, Any]) -> list[dict[str, Any]]:
    raise Unreadable("it was asked of /v1/responses")


_ROUTES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "/chat/completions": _chat,
    "/completions": _completions,
    "/responses": _responses,
}
