"""What the OpenAPI document says of the responses of endpoints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from outrider.server.protocol import answers

Responses = dict[int | str, dict[str, Any]]
"""What the OpenAPI document says of the responses of an endpoint."""

_STATUSES: dict[int | str, str] = {
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


def errors_as(shape: type[BaseModel]) -> Responses:
    """The errors of an endpoint, in this shape. One has the model, for FastAPI to describe: it builds a
    validator for each that has."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}
    errors: Responses = {
        status: {"description": why, "content": content} for status, why in _STATUSES.items()
    }
    return errors | {400: {"model": shape, "description": _STATUSES[400]}}


ERRORS = errors_as(answers.ErrorAnswer)
ANSWER: Responses = {200: {"description": "The answer."}}
_EVENT = {
    "type": "object",
    "description": "One event: `data` is JSON, or [DONE].",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
ANSWER_OR_EVENTS: Responses = {
    200: {"description": "The answer.", "content": {"text/event-stream": {"schema": _EVENT}}}
}
ANSWER_OR_LINES: Responses = {
    200: {"description": "The answer.", "content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
}
METRICS: Responses = {
    200: {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
