"""From a plan to a response: generations that run together give one answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.core.data import Completion, Update
from outrider.core.errors import OutriderError
from outrider.server.apis.answers import EVENTS, LINES, Answer, Choice, estimate_of
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import GenerationRequest
from outrider.server.errors import Problem, internal_error, problem_of
from outrider.server.keys import Caller, TokenUsage
from outrider.server.models import models_of
from outrider.server.service import Service, caller_of
from outrider.server.worker import Job, Outcome

_Body = TypeVar("_Body", bound=GenerationRequest)


def _streams(media_type: str, what: str) -> dict[int | str, dict[str, Any]]:
    """What the OpenAPI document says of an endpoint that streams, besides JSON."""
    return {200: {"description": what, "content": {media_type: {"schema": {"type": "string"}}}}}


EVENTS_TOO = _streams(EVENTS, "The answer; with `stream`, events whose data is JSON or [DONE].")
LINES_TOO = _streams(LINES, "The answer, or lines of JSON.")

_QUIET_S = 15.0
"""After this silence a comment is sent, so that no proxy closes the connection."""


class Generations:
    """The running generations of one answer. Closing `stack` cancels them; what they generated counts against
    the caller's limits. After `max_decode_s` a choice ends once it has begun a new line."""

    def __init__(
        self, service: Service, caller: Caller, stack: ExitStack, max_decode_s: float | None = None
    ) -> None:
        self._service = service
        self._max_decode_s = max_decode_s
        self._caller = caller
        self._stack = stack
        self._outcomes: asyncio.Queue[tuple[Choice, Outcome]] = asyncio.Queue()
        self._jobs: dict[int, Job] = {}
        """by index of the choice"""
        self._began_s: dict[int, float] = {}
        """loop time of the first tokens, by index of the choice"""
        self.num_open = 0

    def end_thought(self) -> None:
        """End the reasoning of all choices."""
        for job in self._jobs.values():
            self._service.worker.end_thought(job)

    async def start(self, choice: Choice) -> None:
        """Submit a choice's request. Raises Problem, and the engine's errors."""
        request = choice.request
        room = self._service.context_tokens - len(request.prompt)
        longest = room if request.max_tokens is None else min(request.max_tokens, room)
        used = self._stack.enter_context(self._caller.reserved(len(request.prompt), longest))
        job = await self._service.worker.submit(request, partial(self._take, choice, used))
        self._stack.callback(self._service.worker.cancel, job)
        self._jobs[choice.index] = job
        choice.request = job.request
        used.prompt_tokens = len(job.request.prompt)
        self.num_open += 1

    def _take(self, choice: Choice, used: TokenUsage, job: Job, outcome: Outcome) -> None:
        """Count the tokens of a generation, also after its client has left."""
        if isinstance(outcome, Update):
            used.completion_tokens += len(outcome.record.tokens)
        elif isinstance(outcome, Completion):
            choice.queued_s = job.queued_s
            if (metrics := self._service.metrics) is not None:
                estimate, _ = estimate_of(outcome, self._service.policy)
                speedup, key = estimate.speedup if estimate else None, self._caller.name
                metrics.observe_request(outcome, queued_s=job.queued_s, key=key, speedup=speedup)
        self._outcomes.put_nowait((choice, outcome))

    async def next(self) -> tuple[Choice, Update | Completion]:
        """The next update or completion of a choice. Raises Problem for a generation that failed or was
        broken off."""
        choice, outcome = await self._outcomes.get()
        if isinstance(outcome, Update):
            if outcome.error is not None:
                raise problem_of(outcome.error)
            now_s = asyncio.get_running_loop().time()
            began_s = self._began_s.setdefault(choice.index, now_s)
            is_late = self._max_decode_s is not None and now_s - began_s > self._max_decode_s
            if is_late and "\n" in choice.content and not choice.is_cut:
                choice.is_cut = True
                self._service.worker.cancel(self._jobs[choice.index])
            return choice, outcome
        broken_off = self._service.worker.state().draining
        if isinstance(outcome, Completion):
            broken_off = outcome.finish_reason == "cancelled" and not choice.is_cut
        if broken_off:
            message = "the server is shutting down and stopped this answer. Try again later."
            raise Problem(503, message, code="cancelled", retry_after_s=5)
        if isinstance(outcome, OutriderError):
            raise problem_of(outcome)
        self.num_open -= 1
        return choice, outcome


async def answer(
    request: Request,
    body: _Body,
    plan: Callable[[Service, _Body, str], GenerationPlan],
    make: Callable[[Service, _Body, GenerationPlan], Answer],
) -> Response:
    """The response to a request: a JSON object, or a stream. `plan` gets the caller's cache namespace, `make`
    makes the answer. Raises Problem and OutriderError."""
    caller = caller_of(request)
    async with models_of(request).serving(body.model) as service:
        planned, notices = await service.noticed(partial(plan, service, body, caller.namespace))
        result = make(service, body, planned)
        result.notices = notices
        with ExitStack() as stack:
            running = Generations(service, caller, stack, planned.max_decode_s)
            if planned.requests[0].thought is not None:
                for name in filter(None, (result.id, getattr(request.state, "request_id", ""))):
                    service.thinking[caller.name, name] = running.end_thought
                    stack.callback(service.thinking.pop, (caller.name, name), None)
            for choice in result.choices:
                await running.start(choice)
            if body.stream:
                return EventStream(
                    _events(service, running, result, request.url.path),
                    result.media_type,
                    stack.pop_all().close,
                )
            leaving = asyncio.create_task(_end_when_left(request, stack))
            try:
                while running.num_open:
                    choice, outcome = await running.next()
                    choice.take(outcome)
                return JSONResponse(result.whole())
            except Problem:
                if not leaving.done():
                    raise
                return Response(status_code=499)
            finally:
                leaving.cancel()


async def _end_when_left(request: Request, stack: ExitStack) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stack.close()


async def _events(service: Service, running: Generations, result: Answer, path: str) -> AsyncIterator[bytes]:
    """The bytes of a stream, with comments in long silences."""
    frame = _event if result.media_type == EVENTS else _line
    for data in result.first():
        yield frame(data)
    clock = asyncio.get_running_loop().time
    sent_s = clock()
    try:
        while running.num_open:
            try:
                async with asyncio.timeout_at(sent_s + _QUIET_S):
                    choice, outcome = await running.next()
            except TimeoutError:
                if frame is _event:
                    yield b": waiting\n\n"
                sent_s = clock()
                continue
            for data in result.next(choice, choice.take(outcome)):
                yield frame(data)
                sent_s = clock()
    except Exception as error:
        problem = error if isinstance(error, Problem) else internal_error("the server failed.")
        if service.metrics is not None:
            service.metrics.observe_error(problem.status, problem.code)
        yield frame(result.failed(problem, path))
        if problem is not error:
            raise
        return
    if result.done:
        yield f"data: {result.done}\n\n".encode()


def _event(data: dict[str, Any]) -> bytes:
    """One server-sent event; a typed one has its type as its name."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return name.encode() + b"data: " + _line(data) + b"\n"


def _line(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"{text}\n".encode(errors="replace")


class EventStream(StreamingResponse):
    """A stream; `close` is called when it has ended, for whatever reason."""

    def __init__(self, events: AsyncIterator[bytes], media_type: str, close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type=media_type, headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
