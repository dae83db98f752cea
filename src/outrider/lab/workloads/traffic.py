"""Requests that a server logged (`outrider serve --log-json --log-prompts`), to be asked again.

What they ask is taken over: messages, tools, schemas, and their limit on the answer up to the workload's.
How the answer is sampled is the workload's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outrider.core.files import parse_json
from outrider.lab.prompts import Prompt
from outrider.lab.workloads.lines import Unreadable, prompt_of_request, text_of


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
        raise Unreadable("the body is no object")
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


def _responses(body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = body.get("input")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list):
        raise Unreadable("the input is no conversation")
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    text = body.get("text")
    chat = {
        "messages": system + _turns(items),
        "tools": [_nested(tool) for tool in body.get("tools") or ()],
        "tool_choice": body.get("tool_choice"),
        "response_format": text.get("format") if isinstance(text, dict) else None,
        "max_tokens": body.get("max_output_tokens"),
    }
    return _chat(chat)


def _nested(tool: Any) -> Any:
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}


def _turns(items: list[Any]) -> list[dict[str, Any]]:
    """Messages; what the assistant thought, said and called in one turn is one of them."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, dict):
            raise Unreadable("an item of the input is no object")
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "message" and role != "assistant":
            turns.append({"role": role, "content": item.get("content")})
        elif kind == "function_call_output":
            turn = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            turns.append(turn)
        else:
            _add_to_assistant(turns, kind, item)
    return turns


def _add_to_assistant(turns: list[dict[str, Any]], kind: str, item: Mapping[str, Any]) -> None:
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if turn is None or (turn["content"] and kind != "function_call"):
        turn = {"role": "assistant", "content": ""}
        turns.append(turn)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "message":
        turn["content"] = text_of(item.get("content")) or ""
    elif kind == "reasoning":
        turn["reasoning_content"] = text_of(item.get("content")) or ""
    else:
        raise Unreadable(f"the input holds an item of type {kind}")


_ROUTES: dict[str, Callable[[dict[str, Any]], list[dict[str, Any]]]] = {
    "/chat/completions": _chat,
    "/completions": _completions,
    "/responses": _responses,
}
