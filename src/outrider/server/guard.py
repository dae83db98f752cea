"""Who may ask for what: API keys, and everything else that stands between a client and the application."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from math import ceil
from time import monotonic

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.bodies import BodyLimit, TimeLimit
from outrider.server.hosts import HostCheck
from outrider.server.keys import ApiKey, KeyRing
from outrider.server.limits import Caller, Clock, Meter
from outrider.server.logs import RequestLog
from outrider.server.problems import Problem
from outrider.server.settings import ServeSettings

__all__ = ["Guard", "Refusals", "protect"]

_HEALTH, _PAGE, _METRICS = "/health", "/", "/metrics"

_DEFAULT_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    # Answers are data; the page brings a policy of its own.
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""What every answer carries that does not say otherwise."""

_EXPOSED = ("x-request-id", "retry-after", "x-should-retry")

ObserveError = Callable[[int, str], None]
"""Told the status and the code of every refusal."""


def protect(
    app: ASGIApp,
    settings: ServeSettings,
    ring: KeyRing,
    *,
    observe_error: ObserveError | None = None,
    clock: Clock = monotonic,
) -> ASGIApp:
    """The application behind everything that keeps it safe; what a server is to run.

    From the outside in: request id and log, headers, CORS, refusals in OpenAI's shape, names and origins,
    keys and their limits, the body's size and time, the request's time.
    """
    app = TimeLimit(app, settings.timeout)
    app = BodyLimit(app, settings.max_body, settings.body_timeout)
    open_paths = {
        _HEALTH,
        *([_PAGE] if settings.page else []),
        *([_METRICS] if settings.metrics_open else []),
    }
    app = Guard(app, ring, open_paths=open_paths, admin_paths={_METRICS} - open_paths, clock=clock)
    app = HostCheck(app, settings.host, settings.allowed_host, settings.cors_origin)
    app = Refusals(app, observe_error)
    if settings.cors_origin:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    app = DefaultHeaders(app)
    return RequestLog(app, bodies=settings.log_prompts, quiet={_HEALTH, _METRICS})


class Guard:
    """Lets requests through that bring a key, within its limits; what they use is `state.caller`.

    Without keys everyone is let through. `open_paths` need none, `admin_paths` an admin's.
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        *,
        open_paths: Collection[str] = (),
        admin_paths: Collection[str] = (),
        clock: Clock = monotonic,
    ) -> None:
        self._app = app
        self._ring = ring
        self._open = frozenset(open_paths)
        self._admin = frozenset(admin_paths)
        self._meters = {key.name: Meter(key.limits, clock) for key in ring.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises Problem, RateLimited among them."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        if not self._ring or scope["path"] in self._open:
            state["caller"] = Caller()
            await self._app(scope, receive, send)
            return
        key = self._identify(Headers(scope=scope))
        meter = self._meters[key.name]
        state["caller"] = Caller(key, meter)
        if scope["path"] in self._admin and not key.admin:
            message = "this key may not read it. Use one with admin = true, or --metrics-open."
            raise Problem(403, message, code="not_admin")
        # Only what may make the models work counts as a request.
        with meter.request() if scope["method"] == "POST" else nullcontext():
            await self._app(scope, receive, _telling(meter, send))

    def _identify(self, headers: Headers) -> ApiKey:
        presented = _presented(headers)
        challenge = {"WWW-Authenticate": "Bearer"}
        if presented is None:
            message = "an API key is needed. Send it as Authorization: Bearer KEY, or as x-api-key."
            raise Problem(401, message, code="missing_api_key", headers=challenge)
        key = self._ring.find(presented)
        if key is None:
            message = "this API key is not accepted. Ask whoever runs the server for one."
            raise Problem(401, message, code="invalid_api_key", headers=challenge)
        return key


def _presented(headers: Headers) -> str | None:
    """The key that a request brings, if any."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key")


def _telling(meter: Meter, send: Send) -> Send:
    """Add what is left of the key's limits to the answer's headers."""
    buckets = [
        (kind, bucket)
        for kind, bucket in (("requests", meter.requests), ("tokens", meter.tokens))
        if bucket is not None
    ]

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for kind, bucket in buckets:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{ceil(bucket.wait_s(bucket.per_minute))}s"
        await send(message)

    return tell if buckets else send


class Refusals:
    """Answers the Problems that the middleware behind it raises, in OpenAI's shape."""

    def __init__(self, app: ASGIApp, observe_error: ObserveError | None = None) -> None:
        self._app = app
        self._observe_error = observe_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        try:
            await self._app(scope, receive, send)
        except Problem as error:
            if self._observe_error is not None:
                self._observe_error(error.status, error.code)
            await JSONResponse(error.body, error.status, headers=error.headers)(scope, receive, send)


class DefaultHeaders:
    """Adds the headers that keep browsers from doing more with an answer than is meant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _DEFAULT_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, dressed)
