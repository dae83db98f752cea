"""What the port answers until the models are loaded: 503, in llama-server's form."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

_PATIENCE_S = 5.0
"""for a client to send its request"""
_RETRY_S = 2


class Loading:
    """Answers every request on bound sockets with 503 and what is being `doing`, in threads of its own.

    A context manager; at its end the sockets are left open for the server.
    """

    def __init__(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        self.doing = "loading the models"
        self._servers = [_Server(bound, tls, self) for bound in sockets]
        self._threads = [
            Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in self._servers
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bound: socket.socket, tls: ssl.SSLContext | None, loading: Loading) -> None:
        super().__init__(bound.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.loading = loading
        self._tls = tls
        self.server_activate()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = self.socket.accept()
        if self._tls is not None:
            # The handshake is made when the request is read, in the connection's own thread.
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _PATIENCE_S
    server: _Server
    server_version = "outrider"
    sys_version = ""

    def _answer(self) -> None:
        message = f"Loading model: the server is {self.server.loading.doing}"
        error = {"code": 503, "message": message, "type": "unavailable_error"}
        body = json.dumps({"error": error}).encode()
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", str(_RETRY_S))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_OPTIONS = do_PUT = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: object) -> None:
        """The log begins when the server does."""
