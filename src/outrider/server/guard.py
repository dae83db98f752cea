"""Everything between a client and the application: names and origins, API keys, sizes and times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from contextlib import nullcontext
from math import ceil
from time import monotonic
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.errors import Problem
from outrider.server.keys import ApiKey, Caller, Clock, KeyRing, RateLimiter
from outrider.server.logs import RequestLog
from outrider.server.settings import ServeSettings, is_loopback

_NOT_IN_HOST = frozenset("@/\\?#")
"""What no Host header holds, and what would make another address of it."""
_HEALTH, _PAGE, _METRICS = "/health", "/", "/metrics"

_DEFAULT_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    # Answers are data; the page brings a policy of its own.
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Added to every answer that does not set them: they keep browsers from doing more with it than is meant."""

_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")

ObserveError = Callable[[int, str], None]
"""Called with the status and the code of every refusal."""


def protect(
    app: ASGIApp,
    settings: ServeSettings,
    ring: KeyRing,
    *,
    observe_error: ObserveError | None = None,
    clock: Clock = monotonic,
) -> ASGIApp:
    """The application after everything that keeps it safe; what a server is to run.

    From the outside in: request id and log, headers, CORS, refusals in OpenAI's shape, names and origins,
    keys and their limits, the body's size and time, the request's time.
    """
    open_paths = {
        _HEALTH,
        *([_PAGE] if settings.page else []),
        *([_METRICS] if settings.metrics_open else []),
    }
    guarded = limit_time(app, settings.timeout)
    guarded = limit_body(guarded, settings.max_body, settings.body_timeout)
    guarded = authenticate(guarded, ring, open_paths, {_METRICS} - open_paths, clock)
    guarded = check_origins(guarded, settings.host, settings.allowed_host, settings.cors_origin)
    guarded = answer_problems(guarded, observe_error)
    if settings.cors_origin:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    guarded = add_default_headers(guarded)
    guarded = RequestLog(guarded, bodies=settings.log_prompts, quiet={_HEALTH, _METRICS})

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        await (guarded if scope["type"] == "http" else app)(scope, receive, send)

    return dispatch


# Keys


def authenticate(
    app: ASGIApp, ring: KeyRing, open_paths: Collection[str], admin_paths: Collection[str], clock: Clock
) -> ASGIApp:
    """Let requests through that bring a key, within its limits; what they use is `state.caller`.

    Without keys everyone is let through. `open_paths` need none, `admin_paths` an admin's. Raises Problem,
    RateLimited among them.
    """
    limiters = {key.name: RateLimiter(key.limits, clock) for key in ring.keys}

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        if not ring or scope["path"] in open_paths:
            state["caller"] = Caller()
            await app(scope, receive, send)
            return
        key = _identify(ring, Headers(scope=scope))
        limiter = limiters[key.name]
        state["caller"] = Caller(key, limiter)
        if scope["path"] in admin_paths and not key.admin:
            message = "this key may not read it. Use one with admin = true, or --metrics-open."
            raise Problem(403, message, code="not_admin")
        # Only what may make the models work counts as a request.
        with limiter.request() if scope["method"] == "POST" else nullcontext():
            await app(scope, receive, _with_limits(limiter, send))

    return call


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


def _with_limits(limiter: RateLimiter, send: Send) -> Send:
    """Add what is left of the key's limits to the answer's headers."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for kind, bucket in (("requests", limiter.requests), ("tokens", limiter.tokens)):
                if bucket is not None:
                    headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                    headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
                    headers[f"x-ratelimit-reset-{kind}"] = f"{ceil(bucket.wait_s(bucket.per_minute))}s"
        await send(message)

    return sending


# Refusals and headers


def answer_problems(app: ASGIApp, observe_error: ObserveError | None) -> ASGIApp:
    """Answer the Problems that inner middleware raises, in OpenAI's shape."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Problem as error:
            if observe_error is not None:
                observe_error(error.status, error.code)
            await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, send)

    return call


def add_default_headers(app: ASGIApp) -> ASGIApp:
    """Add `_DEFAULT_HEADERS`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _DEFAULT_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await app(scope, receive, sending)

    return call


# Names and origins
#
# A name that an attacker owns can be pointed at 127.0.0.1 (DNS rebinding): so a server on loopback answers
# only to names of loopback. And a page may send requests to any address, though it cannot read the answers:
# so what names another page's origin is refused, unless that origin is allowed.


def check_origins(
    app: ASGIApp, host: str, allowed_hosts: Collection[str], cors_origins: Collection[str]
) -> ASGIApp:
    """Refuse foreign names and origins.

    `host` is where the server listens, `allowed_hosts` are further names of it, `cors_origins` those of
    pages that may use it ("*": all). Beyond loopback names are checked only if some are given. Raises
    Problem.
    """
    allowed = {name.lower() for name in allowed_hosts}
    names = {host.strip("[]").lower(), *allowed}
    origins = {origin.lower() for origin in cors_origins}
    checks_names = is_loopback(host) or bool(allowed)

    def check_name(given: str) -> None:
        name = _hostname(given)
        if name is None or (name not in names and not is_loopback(name)):
            message = f"the host {given[:100]!r} is none of this server's names."
            way_out = "Use its address, or start it with --allowed-host and this name."
            raise Problem(421, f"{message} {way_out}", code="unknown_host")

    def check_origin(origin: str, given: str | None) -> None:
        if "*" in origins or origin.lower() in origins:
            return
        place = origin.partition("://")[2].lower()
        if place and (place == (given or "").lower() or _hostname(place) in allowed):
            return
        message = f"pages of {origin[:100]!r} may not use this server."
        way_out = "Start it with --cors-origin and this origin if they should."
        raise Problem(403, f"{message} {way_out}", code="cross_origin")

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given, origin = headers.get("host"), headers.get("origin")
        # Without a host it is no browser that asks, and only browsers can be misled.
        if given is not None and checks_names:
            check_name(given)
        if origin is not None:
            check_origin(origin, given)
        await app(scope, receive, send)

    return call


def _hostname(host: str) -> str | None:
    """The name of a Host header, without the port; None where it is none."""
    if not _NOT_IN_HOST.isdisjoint(host):
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


# Sizes and times


def limit_body(app: ASGIApp, max_bytes: int, timeout_s: float) -> ASGIApp:
    """Refuse bodies of more than `max_bytes`, and those that take more than `timeout_s` to arrive.

    The body is read as a whole before the application sees the request: what is too large or too slow never
    gets there. Raises Problem.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        _check_body_headers(Headers(scope=scope), max_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                body = await _read(receive, max_bytes)
        except TimeoutError:
            message = f"the body took more than {timeout_s:g} s. Send it faster, or less of it."
            close = {"Connection": "close"}
            raise Problem(408, message, code="body_timeout", headers=close) from None
        if body is None:
            return
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:  # then what follows it: the client's leaving
            return unread.pop() if unread else await receive()

        await app(scope, replay, send)

    return call


def _check_body_headers(headers: Headers, max_bytes: int) -> None:
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy in front that goes by the other one would take the body's end for a new request.
        message = "the body has two lengths, content-length and transfer-encoding. Send one of them."
        raise Problem(400, message, code="invalid_http", headers={"Connection": "close"})
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"content-encoding {encoding[:50]!r} is not understood. Send the body as it is."
        raise Problem(415, message, code="unsupported_encoding")


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body; None when the client left before its end."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> Problem:
    message = f"the body has more than {max_bytes} bytes. Send less (the server's --max-body)."
    return Problem(413, message, code="body_too_large")


def limit_time(app: ASGIApp, timeout_s: float) -> ASGIApp:
    """End requests that take longer than `timeout_s`; the application is cancelled.

    A stream of events that is under way ends with an event that says so. Raises Problem.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        started: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
            await send(message)

        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                await app(scope, receive, sending)
        except TimeoutError:
            if not limit.expired():
                raise
            await _end_late(timeout_s, started, send)

    return call


async def _end_late(timeout_s: float, started: Message | None, send: Send) -> None:
    message = f"the request took more than {timeout_s:g} s. Ask for less (max_tokens)."
    headers = {"X-Should-Retry": "false"}
    error = Problem(504, message, code="timeout", type="timeout_error", headers=headers)
    if started is None:
        raise error
    # Any other answer stays without its end, so the server closes the connection.
    kind = Headers(raw=started.get("headers", [])).get("content-type", "")
    if kind.startswith("text/event-stream"):
        event = f"data: {json.dumps(error.body)}\n\n".encode()
        await send({"type": "http.response.body", "body": event, "more_body": False})
