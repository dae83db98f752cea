"""Every error in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or in that of another API
at its endpoints. A message names the input, the reason and the way out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from outrider.core.errors import (
    BackendError,
    ConstraintError,
    GrammarError,
    InputError,
    OutriderError,
    PromptError,
    SettingError,
)
from outrider.core.invalid import accepted

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_KNOWN: tuple[tuple[type[OutriderError], int, str], ...] = (
    (BackendError, 500, "backend_error"),
    (GrammarError, 400, "invalid_grammar"),
    (PromptError, 400, "invalid_prompt"),
    (SettingError, 400, "invalid_value"),
    (ConstraintError, 400, "constraint_failed"),
    (InputError, 400, "invalid_request"),
    (OutriderError, 500, "internal_error"),
)
"""Status and code of Outrider's own errors; the first that fits holds."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_WAYS_OUT = {
    "(--lenient-schema)": '("strict": false)',
    "(--raw)": "(/v1/completions)",
    "(-c)": "(-c, where the server is started)",
    "Choose --rule token": 'Send "rule": "token"',
}
"""What errors say of the command line, and what requests say instead."""
_MAX_MESSAGE_CHARACTERS = 2_000
_FRAMES = {"text/event-stream": "data: {}\n\n", "application/x-ndjson": "{}\n"}
"""How an error is written into a stream."""

ObserveError = Callable[[int, str], None]
"""Called with the status and the code of every error."""


class Problem(Exception):
    """An error that is the answer: raised anywhere in a route, sent by the handler. `param` is the path of
    the field at fault: `messages[0].content`. `retry_after_s` says when to ask again; infinity: never."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        type: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s == math.inf:
            self.headers["X-Should-Retry"] = "false"
        elif retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    @property
    def body(self) -> dict[str, Any]:
        """The error object; what UTF-8 cannot write is replaced."""
        message, param = (
            text and text.encode("utf-8", errors="replace").decode()
            for text in (self.message[:_MAX_MESSAGE_CHARACTERS], self.param)
        )
        return {"error": {"message": message, "type": self.type, "param": param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """The response, in the shape of the API at this path."""
        return JSONResponse(self.body_at(path), self.status, headers=self.headers)

    def body_at(self, path: str) -> dict[str, Any]:
        """The error object in the shape of the API at this path."""
        shape = next((shape for start, shape in _SHAPES if path.startswith(start)), None)
        return shape(self.status, self.body["error"]) if shape else self.body

    def in_stream(self, media_type: str, path: str) -> Message | None:
        """The last part of a stream that has begun; None for a response without a place for errors, which
        then breaks off."""
        if (frame := _FRAMES.get(media_type.partition(";")[0])) is None:
            return None
        event = frame.format(json.dumps(self.body_at(path))).encode()
        return {"type": "http.response.body", "body": event, "more_body": False}


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Raise every Problem in terms of another API's names of fields."""
    try:
        yield
    except Problem as error:
        own = re.split(r"[.[]", error.param or "")[0]
        if own in names:
            error.message = error.message.replace(own, names[own], 1)
            error.param = (error.param or "").replace(own, names[own], 1)
        raise


def _anthropic(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


_SHAPES: tuple[tuple[str, Callable[[int, Mapping[str, Any]], dict[str, Any]]], ...] = (
    ("/v1/messages", _anthropic),
    ("/api/", lambda _, error: {"error": error["message"]}),
    *(
        (path, lambda status, error: {"error": {**error, "code": status}})
        for path in ("/completion", "/infill", "/props", "/apply-template")
    ),
)
"""Where errors have another shape than OpenAI's, by the beginnings of paths."""


def invalid_field(param: str, why: str, *, code: str = "invalid_value") -> Problem:
    """A field that cannot be used (400): `why`, and the way out, as sentences."""
    return Problem(400, f"{param}: {why}", code=code, param=param)


def internal_error(message: str = "the server failed; its log says how.") -> Problem:
    """An unexpected failure."""
    return Problem(500, message, code="internal_error")


def problem_of(error: OutriderError, param: str | None = None) -> Problem:
    """An error of Outrider's as a Problem; `param` is the field that led to it."""
    status, code = next((status, code) for kind, status, code in _KNOWN if isinstance(error, kind))
    if isinstance(error, BackendError):  # it names a file, which a client does not have
        message = f"the server's model failed: {error.why}. Ask again; the server's log may say more."
        return Problem(status, message, code=code)
    message = str(error) if param is None else f"{param}{str(error).removeprefix(error.what)}"
    for ours, theirs in _WAYS_OUT.items():
        message = message.replace(ours, theirs)
    if isinstance(error, SettingError) and param is None:
        param = error.what.replace(" ", "_").replace("-", "_")  # as requests spell it
    return Problem(status, message, code=code, param=param)


def install(app: FastAPI, observe: ObserveError | None = None) -> None:
    """Answer every error of the application in this shape, and let `observe` know."""

    async def answer(request: Request, error: Exception) -> Response:
        problem = _problem(request, error)
        if observe is not None:
            observe(problem.status, problem.code)
        return problem.response(request.url.path)

    for kind in (Problem, OutriderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case OutriderError():
            return problem_of(error)
        case RequestValidationError():
            return invalid_body(error.errors(), error.body)
        case HTTPException():
            return _of_http(request, error)
    return internal_error()  # it is logged where it is raised again


def _of_http(request: Request, error: HTTPException) -> Problem:
    status, path = error.status_code, request.url.path[:200]
    code, why = "http_error", f"{error.detail}."
    if status == 404:
        code, why = "not_found", f"there is nothing at {path}. /v1/models tells what is served."
    elif status == 405:
        allowed = (error.headers or {}).get("allow", "another method")
        code, why = "method_not_allowed", f"{request.method} is not allowed at {path}. Use {allowed}."
    elif status == 400:  # the body cannot be read at all
        code, why = "invalid_json", "the body is not JSON: give valid UTF-8, nested no deeper than need be."
    return Problem(status, why, code=code, headers=error.headers)


# Requests that do not fit their models


def invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> Problem:
    """What pydantic found as one Problem: where several alternatives failed, of the one that got furthest."""
    placed = [(_steps(error, body), error) for error in errors]
    steps, found = max(placed, key=lambda one: (one[1]["type"] == "unsupported", len(one[0])))
    takes = accepted([error for other, error in placed if other == steps]) or "what docs/api.md says of it"
    kind, context = found["type"], found.get("ctx") or {}
    if kind.startswith("union_tag"):  # it is about the field that says which object this is
        steps = [*steps, context["discriminator"].strip("'")]
        kind = "missing" if found["input"].get(steps[-1]) is None else kind
    elif kind == "unsupported" and context.get("field"):
        steps = [*steps, context["field"]]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    where = path or "the body"
    if kind == "json_invalid":
        code, why = "invalid_json", f"the body is not JSON: {context.get('error', 'it is broken')}."
    elif isinstance(body, bytes):  # of another content type, or of none
        code, why = "invalid_json", "the body must be JSON. Send it with content-type: application/json."
    elif kind == "extra_forbidden":
        way_out = "Not a field of this endpoint (docs/api.md lists them); leave it out."
        code, why = "unknown_field", f"unknown field: {path}. {way_out}"
    elif kind == "missing":
        code, why = "missing_field", f"{where}: it is missing. Give it."
    elif kind == "unsupported":
        code, why = "unsupported", f"{where}: {found['msg']}."
    else:
        code, why = "invalid_value", f"{where}: it has to be {takes}."
    return Problem(400, why, code=code, param=path or None)


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
