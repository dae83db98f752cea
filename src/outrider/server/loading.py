"""What the port answers until the models are loaded: 503, in llama-server's form."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from threading import Thread
from time import sleep
from typing import Self

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.server.running import http_config
from outrider.server.settings import ServeSettings

_RETRY_S = 2
_END_S = 0.5
"""for answers under way; a client that holds its connection longer is left to the thread"""


class Loading:
    """Answers every request on bound sockets with 503 and what is being `doing`, in a thread of its own.

    A context manager; at its end the sockets are left open for the server.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], settings: ServeSettings, tls: ssl.SSLContext | None = None
    ) -> None:
        self.doing = "loading the models"
        self._server = uvicorn.Server(http_config(self._answer, settings, tls))
        own = [bound.dup() for bound in sockets]  # the server closes those that it listens to
        self._thread = Thread(target=self._server.run, args=(own,), daemon=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"Loading model: the server is {self.doing}"
        error = {"code": 503, "message": message, "type": "unavailable_error"}
        headers = {"Retry-After": str(_RETRY_S), "Connection": "close"}
        await JSONResponse({"error": error}, 503, headers)(scope, receive, send)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            sleep(0.001)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(_END_S)
