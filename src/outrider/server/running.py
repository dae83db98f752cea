"""The HTTP server itself: sockets and TLS before anything is loaded, slow clients, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic
from types import FrameType

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
_LARGEST_HEAD_BYTES = 64 * 2**10
_BACKLOG = 512

Drain = Callable[[float], Awaitable[None]]
"""Refuse new requests, let the running ones end for so many seconds, then cancel them."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at the addresses of `host`, all at one port. Raises SettingError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in sorted({(family, address[0]) for family, _, _, _, address in found}):
            try:
                sockets.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            except OSError:
                if not sockets:  # else one of the addresses does, as without IPv6
                    raise
            port = sockets[-1].getsockname()[1]
    except OSError as error:
        why = f"the server cannot listen there ({reason_of(error).partition(' (while')[0]})"
        raise SettingError(f"{host}, port {port}", why, "Give another --host or --port.") from None
    return sockets


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


class _Protocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # of an answer that has begun only its end can be cut off
            self.transport.abort()


class Server(uvicorn.Server):
    """Serves an application until a signal comes. The first SIGTERM or SIGINT drains: nothing new is
    accepted, and running requests get `settings.drain_timeout` seconds. A second one ends the program at
    once. `drain` is called when draining begins, `ready` when connections are accepted. No connection is held
    open for nothing, however slow the client."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        *,
        drain: Drain | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            loop="asyncio",
            http=_Protocol,
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
        super().__init__(config)
        self._settings = settings
        self._drain = drain
        self._ready = ready
        self._waiting: dict[tuple[H11Protocol, int], float] = {}
        """Since when connections wait for their clients, with so many bytes that the kernel has not taken.
        It takes more once a good part of what it has was read: reading byte by byte gains no time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        now_s = monotonic()
        waiting = {
            (connection, connection.transport.get_write_buffer_size())
            for connection in self.server_state.connections
            if isinstance(connection, H11Protocol) and _waits_for_client(connection)
        }
        self._waiting = {key: self._waiting.get(key, now_s) for key in waiting}
        for (connection, _), since_s in self._waiting.items():
            if now_s - since_s > self._settings.client_timeout:
                connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds = self._settings.drain_timeout
        LOG.info(
            "draining", extra={"fields": {"requests": len(self.server_state.tasks), "seconds_left": seconds}}
        )
        draining = asyncio.ensure_future(self._drain(seconds)) if self._drain else None
        await super().shutdown(sockets)
        if draining is not None:
            await draining
        LOG.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's, the signal is not raised again at the end: a drained server has done its work.
        del frame
        if self.should_exit:  # a model call would hold any other way out up; the log may be half written
            os._exit(128 + sig)
        self.should_exit = True


def _waits_for_client(connection: H11Protocol) -> bool:
    """Whether it is up to the client to go on: to read, to send headers, or the rest of a refused body."""
    if connection.transport.get_write_buffer_size():
        return True
    http = connection.conn
    if http.their_state is h11.IDLE:  # between two requests uvicorn has a limit of its own
        return connection.cycle is None or bool(http.trailing_data[0])
    return http.their_state is h11.SEND_BODY and http.our_state is h11.DONE
