"""A small application behind the server's guard, for tests of what gets through to it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from outrider.server import errors
from outrider.server.assembly import protect
from outrider.server.keys import Caller, KeyRing
from outrider.server.settings import ServeSettings

LONG_S = 20.0
"""Longer than any test waits, and short enough that one that fails does not hang."""


class Small:
    """An application that says what it saw (of which `kinds`); `ended` are paths whose handlers were left,
    however."""

    def __init__(self) -> None:
        self.app = FastAPI(redirect_slashes=False)
        self.seen: list[bytes] = []
        self.kinds: list[str | None] = []
        self.ended: list[str] = []
        errors.install(self.app)
        for path in ("/", "/health", "/metrics"):
            self.app.get(path)(_ok)
        self.app.post("/v1/echo/{name}")(self.echo)
        self.app.post("/v1/spend")(_spend)
        self.app.post("/v1/slow")(self.slow)
        self.app.post("/v1/stream")(self.stream)
        self.app.get("/fails")(_fail)
        self.app.get("/large")(self.large)

    async def echo(self, request: Request) -> dict[str, Any]:
        self.seen.append(await request.body())
        self.kinds.append(request.headers.get("content-type"))
        return {"caller": request.state.caller.name, "bytes": len(self.seen[-1])}

    async def slow(self) -> dict[str, Any]:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            self.ended.append("/v1/slow")
        return {}

    async def stream(self, kind: str = "text/event-stream") -> Response:
        async def parts() -> AsyncIterator[str]:
            try:
                yield "data: first\n\n"
                await asyncio.sleep(LONG_S)
            finally:
                self.ended.append("/v1/stream")

        return StreamingResponse(parts(), media_type=kind)

    async def large(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield bytes(65536)
            finally:
                self.ended.append("/large")

        return StreamingResponse(parts())


async def _ok() -> Response:
    return PlainTextResponse("ok")


async def _spend(request: Request, prompt: int, longest: int, used: int) -> dict[str, Any]:
    caller: Caller = request.state.caller
    with caller.reserved(prompt, longest) as bill:
        bill.prompt_tokens, bill.completion_tokens = prompt, used
    return {}


async def _fail() -> None:
    raise ValueError("a defect")


def guarded(ring: KeyRing | None = None, small: Small | None = None, **settings: Any) -> ASGIApp:
    """The small application behind the guard; `settings` are the server's."""
    return protect((small or Small()).app, ServeSettings(**settings), ring or KeyRing())


def client(app: ASGIApp, address: str = "http://127.0.0.1:8080") -> TestClient:
    """Talks to an application without a network."""
    return TestClient(app, base_url=address)
