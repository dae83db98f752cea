"""What the OpenAPI document says of answers and errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from outrider.server.shapes.answers import ErrorAnswer

__all__ = ["describe"]

_ERRORS: dict[int | str, str] = {
    400: "The request cannot be used: `param` names the field, the message the way out.",
    401: "An API key is missing or unknown.",
    403: "The key may not do this.",
    404: "There is no such model, or nothing at this path.",
    405: "The method is not allowed at this path.",
    408: "The request's body took too long.",
    413: "The request's body is too large.",
    429: "Too many requests wait, or a limit of the key is reached; Retry-After says for how long.",
    "4XX": "Another error of the request.",
    500: "The server failed.",
    503: "The server is ending, or is not ready.",
}

_EVENT = {
    "type": "object",
    "description": "One event: `data` is JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def describe(
    model: type[BaseModel] | None = None, *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint that answers with `model`, or with events where it `streams`."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer, "description": why} for status, why in _ERRORS.items()
    }
    if model is not None:
        found[200] = {"model": model, "description": "The answer."}
        if streams:
            found[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    return found
