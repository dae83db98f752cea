"""Requests that a server logged (`outrider serve --log-json --log-prompts`), to be asked again.

What they ask is taken over: messages, tools, schemas, and their limit on the answer up to the workload's.
How the answer is sampled is the workload's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.core.files import parse_json
from outrider.lab.prompts import Prompt
from outrider.lab.workloads.lines import Unreadable, prompt_of_request


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
