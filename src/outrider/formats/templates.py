"""What a chat template expects of conversations with tools, found out by rendering small ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.chat import ChatTemplate
from outrider.core.errors import InputError

_USER = {"role": "user", "content": "user probe"}
_ID = "probe1234"
_NAME = "probe_tool"
_OBJECT = {"probe_key": "probe value"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a template takes calls of earlier turns: their arguments as objects (or as JSON text), several
    in one message (or one)."""

    objects: bool
    several: bool


def tool_support(template: ChatTemplate) -> ToolSupport | None:
    """What the template does with tools; None where tools, their calls or their results do not get into
    its text: then they have to be described in other words."""
    if _NAME not in _render(template, [_USER], tools=True):
        return None
    for objects in (True, False):
        text = _render(template, _turns(1, objects))
        if '"probe_key"' in text and _NAME in text and "probe result" in text:
            several = _render(template, _turns(2, objects)).count('"probe_key"') == 2
            return ToolSupport(objects, several)
    return None


def _turns(num_calls: int, objects: bool) -> list[dict[str, Any]]:
    arguments = _OBJECT if objects else json.dumps(_OBJECT)
    calls = [
        {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        for _ in range(num_calls)
    ]
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "probe result"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *[result] * num_calls]


def _render(template: ChatTemplate, messages: list[dict[str, Any]], *, tools: bool = False) -> str:
    try:
        return template.render(messages, tools=[_TOOL] if tools else None)
    except InputError:
        return ""
