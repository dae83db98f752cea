"""The HTTP server itself: sockets and TLS before anything is loaded, slow clients, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.core.errors import SettingError
from outrider.core.files import reason_of
from outrider.server.settings import ServeSettings

LOG = logging.getLogger("outrider.server")

_IDLE_S = 75
"""How long a connection may be idle between requests: longer than clients and proxies keep theirs."""
_GRACE_S = 5
"""How long answers may take to be sent after their requests were cancelled."""
_FORCED_END_S = 2.0
"""After a second signal, how long the program may take to end before it is killed."""
_LARGEST_HEAD_BYTES = 64 * 2**10
_BACKLOG = 512

Drain = Callable[[float], Awaitable[None]]
"""Refuse new requests, let the running ones end for so many seconds, then cancel them."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at every address of `host`; with port 0 all at one free port. Raises SettingError."""
    what = f"host {host}"
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        why = f"not an address of this machine ({reason_of(error)})"
        raise SettingError(what, why, "Give 127.0.0.1, 0.0.0.0 or another address (--host).") from None
    sockets: list[socket.socket] = []
    for family, _, _, _, address in sorted(set(found)):
        try:
            sockets.append(socket.create_server((address[0], port), family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and len(found) > 1:
                continue  # the other family may do
            close(sockets)
            other = (os.strerror(error.errno or 0).lower(), "Give another --host or --port.")
            why, way_out = _BIND_ERRORS.get(error.errno or 0, other)
            raise SettingError(f"{host}, port {port}", why, way_out) from None
        port = sockets[-1].getsockname()[1]
    if not sockets:
        raise SettingError(what, "not an address of this machine", "Give another one (--host).")
    return sockets


_BIND_ERRORS = {
    errno.EADDRINUSE: ("another program listens there", "Stop it, or give another --port."),
    errno.EACCES: ("this user has no permission to listen there", "Give a --port of 1024 or more."),
    errno.EPERM: ("this user has no permission to listen there", "Give a --port of 1024 or more."),
}


def close(sockets: Sequence[socket.socket]) -> None:
    """Close them all. Doing it twice is harmless."""
    for opened in sockets:
        opened.close()


def check_tls(cert: Path, key: Path) -> None:
    """Raise SettingError for files that cannot be used for HTTPS."""
    try:
        # A password is given so that a protected key fails at once instead of asking at the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = (getattr(error, "reason", None) or reason_of(error)).lower().replace("_", " ")
        what, why = f"{cert}, {key}", f"certificate and key do not work ({reason})"
        raise SettingError(what, why, "Give a PEM chain and its key, without passphrase.") from None


def address_of(sockets: Sequence[socket.socket], *, tls: bool) -> str:
    """The server's address as people type it."""
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _http_config(app: ASGIApp, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        loop="asyncio",
        http=cast(Any, partial(GuardedProtocol, settings=settings)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=settings.max_connections + 1,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=int(settings.drain_timeout) + _GRACE_S,
        h11_max_incomplete_event_size=_LARGEST_HEAD_BYTES,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


class Server(uvicorn.Server):
    """Serves an application until a signal comes.

    The first SIGTERM or SIGINT drains: nothing new is accepted, and running requests get
    `settings.drain_timeout` seconds. A second one ends at once. `drain` is called when draining begins,
    `ready` when connections are accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        *,
        drain: Drain | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(_http_config(app, settings))
        self.status = 0
        """the exit status: 0 after draining, else 128 and the signal's number"""
        self._drain_timeout_s = settings.drain_timeout
        self._drain = drain
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signal = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = {"signal": self._signal, "requests": len(self.server_state.tasks)}
        LOG.info("draining", extra={"fields": running | {"seconds_left": self._drain_timeout_s}})
        asyncio.get_running_loop().call_later(self._drain_timeout_s, self._note_end)
        draining = asyncio.ensure_future(self._drain(self._drain_timeout_s)) if self._drain else None
        await super().shutdown(sockets)
        if draining is not None:
            if self.force_exit:
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        LOG.info("stopped")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if current_thread() is not main_thread():  # signals cannot be listened to
            yield
            return
        # Unlike uvicorn's, the signals are not raised again at the end: a drained server has done its work.
        previous = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        self._signal = signal.Signals(sig).name
        if self.should_exit:
            self.force_exit = True
            self.status = 128 + sig
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abort)
            # A model call, or a thread that is still at work, would hold the program up.
            last = Timer(_FORCED_END_S, os._exit, (self.status,))
            last.daemon = True
            last.start()
        self.should_exit = True

    def _note_end(self) -> None:
        """Let the log say that the server cut off what is still running."""
        for connection in self.server_state.connections:
            if cycle := getattr(connection, "cycle", None):
                cycle.scope["state"]["server_ended"] = True

    def _abort(self) -> None:
        running = {"signal": self._signal, "requests": len(self.server_state.tasks)}
        LOG.warning("ended at once", extra={"fields": running})
        self._note_end()
        for connection in list(self.server_state.connections):
            if transport := getattr(connection, "transport", None):
                transport.abort()


# HTTP/1.1 connections that cannot be held open for nothing, however slow the client.

_LINGER_S = 5.0
"""How long a client may go on sending after it got its answer."""


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a time limit wherever it waits for the client."""

    def __init__(self, *arguments: Any, settings: ServeSettings, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._settings = settings
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer("head", self._settings.body_timeout, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
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
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            self._watch_writing()
        else:  # of an answer that has begun only its end can be cut off
            self.transport.abort()

    def _watch_head(self) -> None:
        """Limit the time of headers that have begun and are not complete."""
        has_begun, _ = self.conn.trailing_data
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("head")
        elif has_begun and not self.transport.is_closing():
            self._start_timer("head", self._settings.body_timeout, self.transport.abort)

    def _watch_writing(self) -> None:
        self._start_timer("write", self._settings.write_timeout, self._end_unread)

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
