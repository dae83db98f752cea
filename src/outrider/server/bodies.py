"""How large a request may be, how slowly it may come, and how long it may take.

The body is read here, as a whole, before the application sees the request: what is too large or too slow
never gets there.
"""

from __future__ import annotations

import asyncio
import json

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.problems import Problem

__all__ = ["BodyLimit", "TimeLimit"]


class BodyLimit:
    """Refuses bodies of more than `max_bytes`, and those that take more than `timeout_s` to arrive."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass the request on. Raises Problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_headers(Headers(scope=scope))
        body = await self._read(receive)
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_headers(self, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front that goes by the other one would take the body's rest for a new request.
            message = "the body has two lengths, content-length and transfer-encoding. Send one of them."
            raise Problem(400, message, code="invalid_http", headers={"Connection": "close"})
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"content-encoding {encoding[:50]!r} is not understood. Send the body as it is."
            raise Problem(415, message, code="unsupported_encoding")

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when the client left before its end."""
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            message_text = f"the body took more than {self._timeout_s:g} s. Send it faster, or less of it."
            close = {"Connection": "close"}
            raise Problem(408, message_text, code="body_timeout", headers=close) from None

    def _too_large(self) -> Problem:
        message = f"the body has more than {self._max_bytes} bytes. Send less (the server's --max-body)."
        return Problem(413, message, code="body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read, then what comes behind it: the client's leaving."""
    kept: list[bytes] = [body]

    async def again() -> Message:
        if kept:
            return {"type": "http.request", "body": kept.pop(), "more_body": False}
        return await receive()

    return again


class TimeLimit:
    """Ends requests that take longer than `timeout_s`; the application is cancelled.

    A stream of events that is under way ends with an event that says so.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises Problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message
            await send(message)

        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                await self._app(scope, receive, watched)
        except TimeoutError:
            if not limit.expired():
                raise
            await self._end(started, send)

    async def _end(self, started: Message | None, send: Send) -> None:
        message = f"the request took more than {self._timeout_s:g} s. Ask for less (max_tokens)."
        headers = {"X-Should-Retry": "false"}
        error = Problem(504, message, code="timeout", type="timeout_error", headers=headers)
        if started is None:
            raise error
        # Any other answer stays without its end, so the server closes the connection.
        kind = Headers(raw=started.get("headers", [])).get("content-type", "")
        if kind.startswith("text/event-stream"):
            event = f"data: {json.dumps(error.body)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})
