"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

A message names the input, the reason and the way out, as the errors of `outrider.core.errors` do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
from outrider.server.jobs import Draining, QueueFull

__all__ = ["Problem", "error_object", "problem", "problem_of", "wrong"]

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

    def response(self) -> Response:
        """The answer that says it."""
        return JSONResponse(self.body, self.status, headers=self.headers)


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
    return Problem(status, message, type=type, code=code, param=param, headers=headers).response()


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
