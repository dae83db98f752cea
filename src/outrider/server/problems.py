"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

A message names the input, the reason and the way out, as the errors of `outrider.core.errors` do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.errors import (
    BackendError,
    ConstraintError,
    GrammarError,
    InputError,
    OutriderError,
    PromptError,
    SettingError,
)
from outrider.server.worker import Draining, QueueFull

__all__ = ["Problem", "error_object", "install", "problem", "problem_of", "wrong"]

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_CODES: dict[type[OutriderError], str] = {
    GrammarError: "invalid_grammar",
    PromptError: "invalid_prompt",
    SettingError: "invalid_value",
    ConstraintError: "constraint_failed",
}
_WAYS_OUT = {
    "(--lenient-schema)": '("strict": false)',
    "(--raw)": "(/v1/completions)",
    "(-c)": "(-c, where the server is started)",
}
"""What an error says of the command line, in terms of a request."""
_LONGEST_MESSAGE = 2_000


class Problem(Exception):
    """An answer that is an error: raised anywhere in a route, sent by the handler.

    `param` is the field at fault, as a path: `messages[0].content`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _type_of(status)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The object that the client gets."""
        return error_object(self.message, type=self.type, code=self.code, param=self.param)


def wrong(param: str, why: str, *, code: str = "invalid_value") -> Problem:
    """A field that cannot be used (400): `why`, and the way out, as sentences."""
    return Problem(400, f"{param}: {why}", code=code, param=param)


def _type_of(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_object(
    message: str, *, type: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The body of an error; what cannot be written as UTF-8 is replaced."""
    return {
        "error": {
            "message": _clean(message[:_LONGEST_MESSAGE]),
            "type": type,
            "param": _clean(param),
            "code": code,
        }
    }


def _clean(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", errors="replace").decode()


def problem(
    status: int,
    message: str,
    *,
    type: str | None = None,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response for an error, for middleware that answers by itself."""
    return _response(Problem(status, message, type=type, code=code, param=param, headers=headers))


def _response(error: Problem) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


def problem_of(error: OutriderError, param: str | None = None) -> Problem:
    """What a client is told of an error that Outrider raised; `param` is the field that led to it."""
    message = str(error)
    for ours, theirs in _WAYS_OUT.items():
        message = message.replace(ours, theirs)
    if isinstance(error, QueueFull):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return Problem(429, message, code="queue_full", headers=retry)
    if isinstance(error, Draining):
        return Problem(503, message, code="draining", headers={"Retry-After": "5"})
    if isinstance(error, BackendError):
        return Problem(500, message, code="backend_error")
    if isinstance(error, SettingError) and param is None:
        param = error.what.replace(" ", "_").replace("-", "_")  # as requests spell it
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "invalid_request")
    status = 400 if isinstance(error, InputError | ConstraintError) else 500
    return Problem(status, message, code=code if status == 400 else "internal_error", param=param)


def install(app: FastAPI) -> None:
    """Answer every error of the application in this shape."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(OutriderError, _on_outrider_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _reported(request, error)


async def _on_outrider_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return _reported(request, problem_of(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _reported(request, invalid(error.errors(), error.body))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path[:200]
    if status == 404:
        found = Problem(
            404, f"there is nothing at {path}. /v1/models tells what is served.", code="not_found"
        )
    elif status == 405:
        message = (
            f"{request.method} is not allowed at {path}. Allowed: {(error.headers or {}).get('allow', '')}."
        )
        found = Problem(405, message, code="method_not_allowed", headers=error.headers)
    else:
        found = Problem(status, f"{error.detail}.", code="http_error", headers=error.headers)
    return _reported(request, found)


async def _on_bug(request: Request, error: Exception) -> Response:
    del error  # it is logged where it is raised again
    return _reported(request, Problem(500, "the server failed; its log says how.", code="internal_error"))


def _reported(request: Request, error: Problem) -> Response:
    meter = getattr(request.app.state, "meter", None)
    if meter is not None:
        meter.observe_error(error.status, error.code)
    return _response(error)


# What a request that does not fit its shape is told


def invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> Problem:
    """The one complaint that helps most: of alternatives that all failed, the one that got furthest."""
    found = max(errors, key=lambda error: (error["type"] == "unsupported", _depth(error, body)))
    kind, context = found["type"], found.get("ctx") or {}
    path = _path(found, body)
    if kind == "unsupported" and context.get("field"):
        path = f"{path}.{context['field']}" if path else str(context["field"])
    if kind == "json_invalid":
        return Problem(
            400, f"the body is not JSON: {context.get('error', 'it is broken')}.", code="invalid_json"
        )
    if kind == "extra_forbidden":
        message = (
            f"unknown field: {path}. It is none of this endpoint's (docs/api.md lists them); leave it out."
        )
        return Problem(400, message, code="unknown_field", param=path)
    if kind == "missing":
        message = f"{path or 'the body'}: it is missing. Give it, as JSON with content-type application/json."
        return Problem(400, message, code="missing_field", param=path or None)
    sentence = str(found["msg"]).rstrip(".")
    sentence = sentence[:1].lower() + sentence[1:]
    code = "unsupported" if kind == "unsupported" else "invalid_value"
    return Problem(400, f"{path or 'the body'}: {sentence}.", code=code, param=path or None)


def _depth(error: Mapping[str, Any], body: Any) -> int:
    return len(_steps(error, body))


def _path(error: Mapping[str, Any], body: Any) -> str:
    path = ""
    for step in _steps(error, body):
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _steps(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """The place of an error in the body: pydantic's, without the names of alternatives that it tried."""
    steps: list[str | int] = []
    place = list(error["loc"])
    here = body if place[:1] == ["body"] else None
    for i, step in enumerate(place[1:], 1):
        if (isinstance(here, Mapping) and step in here) or (
            isinstance(here, list) and isinstance(step, int) and step < len(here)
        ):
            here = here[step]
        elif not (error["type"] == "missing" and i == len(place) - 1) and place[0] == "body":
            continue
        steps.append(step)
    return steps
