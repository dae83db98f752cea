"""Everything between a client and the application: names and origins, API keys, sizes and times."""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import ObserveError, Problem
from outrider.server.keys import ApiKey, Caller, KeyRing, RateLimiter
from outrider.server.logs import RequestLog
from outrider.server.settings import ServeSettings, is_loopback

_NOT_IN_HOST = frozenset("@/\\?#")
"""Characters that no Host header has and that would change its meaning in a URL."""
_HEALTH, _PAGE, _METRICS = "/health", "/", "/metrics"
_OF_BROWSERS = ("origin", "sec-fetch-site")
"""what browsers send with every POST"""
_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")


def protect(
    app: ASGIApp, settings: ServeSettings, ring: KeyRing, *, observe_error: ObserveError | None = None
) -> ASGIApp:
    """The application behind its guards. From the outside in: request id, log and headers; CORS; the Guard.
    `observe_error` is called for every refusal."""
    guarded: ASGIApp = Guard(app, settings, ring, observe_error)
    if settings.cors_origin:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return RequestLog(guarded, bodies=settings.log_prompts, quiet={_HEALTH, _METRICS})


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
