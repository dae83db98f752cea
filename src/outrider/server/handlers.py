"""What the application answers when something is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.errors import OutriderError
from outrider.server.problems import Problem, problem_of

__all__ = ["install", "invalid"]


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
        why = f"there is nothing at {path}. /v1/models tells what is served."
        found = Problem(404, why, code="not_found")
    elif status == 405:
        allowed = (error.headers or {}).get("allow", "another method")
        why = f"{request.method} is not allowed at {path}. Use {allowed}."
        found = Problem(405, why, code="method_not_allowed", headers=error.headers)
    elif status == 400:  # the body cannot be read at all
        found = Problem(
            400, "the body is not JSON: give valid UTF-8, nested no deeper than need be.", code="invalid_json"
        )
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
    return error.response()


# What a request that does not fit its shape is told


def invalid(errors: Sequence[Mapping[str, Any]], body: Any) -> Problem:
    """The one complaint that helps most: of alternatives that all failed, the one that got furthest."""
    found = max(errors, key=lambda error: (error["type"] == "unsupported", _depth(error, body)))
    kind, context = found["type"], found.get("ctx") or {}
    path = _path(found, body)
    if kind == "unsupported" and context.get("field"):
        path = f"{path}.{context['field']}" if path else str(context["field"])
    if kind == "json_invalid":
        why = f"the body is not JSON: {context.get('error', 'it is broken')}."
        return Problem(400, why, code="invalid_json")
    if isinstance(body, bytes):  # of another content type, or of none
        return Problem(
            400, "the body is read as JSON. Say so: content-type: application/json.", code="invalid_json"
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
