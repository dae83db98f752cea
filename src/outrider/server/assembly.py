"""Models as a web service: the application, and what is between it and its clients. From the outside in:
request ids, log and headers; CORS; names and origins, API keys, sizes and times."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server import errors
from outrider.server.apis import anthropic, chat, completions, info, llama, ollama, responses
from outrider.server.errors import ObserveError, Problem, internal_error
from outrider.server.keys import ApiKey, Caller, KeyRing, RateLimiter
from outrider.server.models import Models
from outrider.server.page import page as web_page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings, is_loopback

LOG = logging.getLogger("outrider.server")

_ROUTERS = [api.router for api in (chat, completions, responses, anthropic, llama, ollama, info)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "An error of the request: the message says the way out."},
    "5XX": {"description": "The server failed, is shutting down or is not ready."},
}


def create_app(served: Service | Models, *, page: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in the shape of its API, and the page
    at /, if it is to be there. There are no pages about /openapi.json: these would load scripts from
    elsewhere."""
    models = served if isinstance(served, Models) else Models.of(served)
    app = FastAPI(
        strict_content_type=False,  # foreign pages are refused by their origin (guard)
        title="Outrider",
        summary="An OpenAI-compatible API with speculative decoding.",
        version=version("outrider"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    app.state.models = models
    errors.install(app, models.metrics.observe_error)
    for router in _ROUTERS:
        app.include_router(router)
    if page:
        app.add_api_route("/", web_page, methods=["GET", "HEAD"], include_in_schema=False)
    return app


def assemble(models: Models, settings: ServeSettings, ring: KeyRing) -> ASGIApp:
    """The guarded application for these models."""
    app = create_app(models, page=settings.page)
    return protect(app, settings, ring, observe_error=models.metrics.observe_error)


def protect(
    app: ASGIApp, settings: ServeSettings, ring: KeyRing, *, observe_error: ObserveError | None = None
) -> ASGIApp:
    """The application behind its guards. `observe_error` is called for every refusal."""
    guarded: ASGIApp = Guard(app, settings, ring, observe_error)
    if settings.cors_origin:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return RequestLog(guarded, bodies=settings.log_prompts)


# Who and what gets through

_NOT_IN_HOST = frozenset("@/\\?#")
"""Characters that no Host header has and that would change its meaning in a URL."""
_HEALTH, _PAGE, _METRICS = "/health", "/", "/metrics"
_OF_BROWSERS = ("origin", "sec-fetch-site")
"""what browsers send with every POST"""
_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")


class Guard:
    """Checks host, origin, API key and limits, reads the body, if it is neither too large nor too slow, and
    ends requests that take too long. Refusals have the shape of the endpoint's API. The caller is in
    `state.caller`."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, ring: KeyRing, observe_error: ObserveError | None
    ) -> None:
        self._app = app
        self._ring = ring
        self._observe_error = observe_error
        self._max_body, self._client_timeout_s = settings.max_body, settings.client_timeout
        self._timeout_s = settings.timeout
        self._limiters = {key.name: RateLimiter(key) for key in ring.keys}
        self._open_paths = {_HEALTH, *([_PAGE] if settings.page else [])}
        if settings.metrics_open:
            self._open_paths.add(_METRICS)
        self._allowed = {name.lower() for name in settings.allowed_host}
        self._names = {settings.host.strip("[]").lower(), *self._allowed}
        self._checks_names = is_loopback(settings.host) or bool(self._allowed)
        self._origins = {origin.lower() for origin in settings.cors_origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            is_open = not self._ring or scope["path"] in self._open_paths
            key = None if is_open else _identify(self._ring, headers)
            limiter = self._limiters[key.name] if key else None
            scope.setdefault("state", {})["caller"] = Caller(limiter)
            if key and scope["path"] == _METRICS and not key.admin:
                message = "this key may not do this. Use one with admin = true, or --metrics-open."
                raise Problem(403, message, code="not_admin")
            # Only what may make the models work counts as a request.
            with limiter.request() if limiter and scope["method"] == "POST" else nullcontext():
                body = await self._read(headers, receive)
                if body is not None:
                    if _is_json_of_curl(headers, body):
                        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                    await self._run(scope, _replayed(body, receive), send)
        except Problem as error:
            if self._observe_error is not None:
                self._observe_error(error.status, error.code)
            await error.response(scope["path"])(scope, receive, send)

    # A name that an attacker owns can be pointed at 127.0.0.1 (DNS rebinding): so a server on loopback
    # answers only to names of loopback. And a page may send requests to any address, though it cannot read
    # the answers: so what names another page's origin is refused, unless that origin is allowed.

    def _check_origin(self, headers: Headers) -> None:
        """Refuse foreign names and origins. Beyond loopback names are checked only if some are given."""
        given, origin = headers.get("host"), headers.get("origin")
        # Without a host it is no browser that asks, and only browsers can be misled.
        if given is not None and self._checks_names:
            name = _hostname(given)
            if name is None or (name not in self._names and not is_loopback(name)):
                message = f"the host {given[:100]!r} is not a name of this server."
                way_out = "Use its address, or start it with --allowed-host and this name."
                raise Problem(421, f"{message} {way_out}", code="unknown_host")
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        place = origin.partition("://")[2].lower()
        if not place or (place != (given or "").lower() and _hostname(place) not in self._allowed):
            message = f"pages of {origin[:100]!r} may not use this server."
            way_out = "Start it with --cors-origin and this origin if they should."
            raise Problem(403, f"{message} {way_out}", code="cross_origin")

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None when the client left before its end. Raises Problem for one that is too large
        or too slow."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front that goes by the other one would take the body's end for a new request.
            message = "the body has two lengths, content-length and transfer-encoding. Send one of them."
            raise Problem(400, message, code="invalid_http", headers=_CLOSE)
        message = f"the body has more than {self._max_body} bytes. Send less (the server's --max-body)."
        too_large = Problem(413, message, code="body_too_large")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"content-encoding {encoding[:50]!r} is not understood. Send the body as it is."
            raise Problem(415, message, code="unsupported_encoding")
        body = bytearray()
        try:
            async with asyncio.timeout(self._client_timeout_s):
                while (part := await receive())["type"] != "http.disconnect":
                    body += part.get("body", b"")
                    if len(body) > self._max_body:
                        raise too_large
                    if not part.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message = f"the body took more than {self._client_timeout_s:g} s. Send it faster, or less of it."
            raise Problem(408, message, code="body_timeout", headers=_CLOSE) from None
        return None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and cancel it when it takes too long: a running stream ends with an event that
        says so."""
        kind: str | None = None

        async def sending(message: Message) -> None:
            nonlocal kind
            if message["type"] == "http.response.start":
                kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            await send(message)

        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                await self._app(scope, receive, sending)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the request took more than {self._timeout_s:g} s. Ask for less (max_tokens)."
            error = Problem(504, message, code="timeout", type="timeout_error", retry_after_s=math.inf)
            if kind is None:
                raise error from None
            if end := error.in_stream(kind, scope["path"]):
                await send(end)


_CLOSE = {"Connection": "close"}


def _is_json_of_curl(headers: Headers, body: bytes) -> bool:
    """Whether a body is JSON that `curl -d` calls a form. Pages may send forms to any server without asking,
    so a browser's is never taken for JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_browser = any(name in headers for name in _OF_BROWSERS)
    return kind == "application/x-www-form-urlencoded" and not is_browser and body.lstrip()[:1] == b"{"


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read, then the client's leaving."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def _identify(ring: KeyRing, headers: Headers) -> ApiKey:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    presented = credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
    challenge = {"WWW-Authenticate": "Bearer"}
    if presented is None:
        message = "an API key is needed. Send it as Authorization: Bearer KEY, or as x-api-key."
        raise Problem(401, message, code="missing_api_key", headers=challenge)
    key = ring.find(presented)
    if key is None:
        message = "this API key is not accepted. Ask whoever runs the server for one."
        raise Problem(401, message, code="invalid_api_key", headers=challenge)
    return key


def _hostname(host: str) -> str | None:
    """The name in a Host header; None where it has none."""
    if not _NOT_IN_HOST.isdisjoint(host):
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


# The log: a line for each request. It has nothing that a client wrote, unless bodies are logged.

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
    logged and answered. `bodies`: log them too."""

    def __init__(self, app: ASGIApp, *, bodies: bool = False) -> None:
        self._app = app
        self._bodies = bodies

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
            is_quiet = scope["path"] in (_HEALTH, _METRICS) and status == 200
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
