"""The log on standard error: a line for each request, as text or as JSON. A line has method, route (the
template, never the path; "-" for none), status, seconds, the key's name, tokens and the request's id. It has
nothing that a client wrote, unless bodies are logged."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import internal_error
from outrider.server.keys import Caller

LOG = logging.getLogger("outrider.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_LOGGED_BYTES = 64 * 2**10
"""How much of a body is logged."""

_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    # Answers are data; the page brings a policy of its own.
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Headers added to every response that does not set them."""

_LEVELS = {"outrider": logging.INFO, "uvicorn": logging.ERROR, "asyncio": logging.ERROR}
"""The loggers that are shown, and their levels: clients' mistakes are no errors of the server."""


class RequestLog:
    """Gives each request an id and each response its headers, and logs it at the end. Unforeseen errors are
    logged and answered. `bodies`: log them too. Requests to `quiet` paths that succeed are logged at debug
    level."""

    def __init__(self, app: ASGIApp, *, bodies: bool = False, quiet: Collection[str] = ()) -> None:
        self._app = app
        self._bodies = bodies
        self._quiet = frozenset(quiet)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        state = scope.setdefault("state", {})
        began_s, body = monotonic(), bytearray()
        status: int | None = None
        is_complete = client_left = False

        async def receiving() -> Message:
            nonlocal client_left
            message = await receive()
            if message["type"] == "http.disconnect":
                client_left = not is_complete
            elif self._bodies:
                body.extend(message.get("body", b"")[: _MAX_LOGGED_BYTES - len(body)])
            return message

        async def sending(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            elif not message.get("more_body", False):
                is_complete = True
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except Exception as error:
            LOG.error("failed", exc_info=error, extra={"fields": {"id": request_id}})
            if status is None:  # else the server closes the connection of an answer without an end
                await internal_error().response()(scope, receive, sending)
        finally:
            caller = state.get("caller") or Caller()
            fields = {
                "method": scope["method"],
                "route": str(getattr(scope.get("route"), "path", None) or "-"),
                "status": status,
                "duration_s": round(monotonic() - began_s, 4),
                "key": caller.name,
                "prompt_tokens": caller.used.prompt_tokens,
                "completion_tokens": caller.used.completion_tokens,
                "id": request_id,
                **({"client_left": True} if client_left else {}),
                **({"body": body.decode("utf-8", errors="replace")} if self._bodies else {}),
            }
            is_quiet = scope["path"] in self._quiet and status == 200
            LOG.log(logging.DEBUG if is_quiet else logging.INFO, "request", extra={"fields": fields})


def log_to_stderr(*, as_json: bool) -> None:
    """Send the server's log to standard error. Doing it again replaces the way it is written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _TextLines())
    for name, level in _LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


class _TextLines(logging.Formatter):
    """A line for people for each event; control characters in it are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        fields = dict(getattr(record, "fields", {}))
        words = [f"{time}Z", record.levelname.lower(), record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in fields.items() if value not in ("", 0, None)]
        lines = [" ".join(words)]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


def _word(value: Any) -> str:
    text = str(value)
    is_plain = text.isprintable() and " " not in text and '"' not in text
    return text if is_plain else json.dumps(text)
