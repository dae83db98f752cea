"""Server-sent events: how they are written, kept alive, and ended when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "event", "unless_gone"]

_Result = TypeVar("_Result")

DONE = "data: [DONE]\n\n"
"""The end of a stream that is whole."""

_QUIET_S = 15.0
"""After such a silence a comment is sent, so that nobody on the way closes the connection."""


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One event."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class EventStream(StreamingResponse):
    """A stream of events; `close` is called when it has ended, however that came about."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_kept_alive(events), media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _kept_alive(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """The events as bytes, with comments where they are far apart."""
    next_event = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait({next_event}, timeout=_QUIET_S)
            if not next_event.done():
                yield b": waiting\n\n"
                continue
            found = next_event.result()
            if found is None:
                return
            yield found.encode("utf-8", errors="replace")
            next_event = asyncio.ensure_future(anext(events, None))
    finally:
        next_event.cancel()
        await asyncio.gather(next_event, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The result of the work; None, with the work broken off, when the client has left meanwhile."""
    task, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
