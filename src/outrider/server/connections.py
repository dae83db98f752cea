"""HTTP/1.1 connections that cannot be held open for nothing, however slow the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from outrider.server.errors import Problem

_LINGER_S = 5.0
"""How long a client that got its answer before it had sent everything may go on sending."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, how long a request's headers may take, and how long an answer
    may stay unread."""

    max_connections: int
    head_timeout_s: float
    write_timeout_s: float


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a limit to each time that it waits for the client, and errors in OpenAI's
    shape where no application is reached."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too many connections are open. Try again later.", "too_many_connections")
        else:
            self._start_timer("head", self._limits.head_timeout_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("head")
        self._stop_timer("write")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_timer("write")
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        self._watch_head()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(_LINGER_S, self._end_lingering)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer and close, where there is still an answer to give."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps(Problem(status, message, code=code).body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._watch_writing()

    def _watch_head(self) -> None:
        """Limit the time of headers that have begun and are not complete."""
        has_begun, _ = self.conn.trailing_data
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("head")
        elif has_begun and not self.transport.is_closing():
            self._start_timer("head", self._limits.head_timeout_s, self.transport.abort)

    def _watch_writing(self) -> None:
        self._start_timer("write", self._limits.write_timeout_s, self._end_unread)

    def _end_unread(self) -> None:
        self._stop_timer("write")
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _end_lingering(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and self.conn.our_state is not h11.SEND_RESPONSE:
            self.transport.abort()

    def _start_timer(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, call)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
