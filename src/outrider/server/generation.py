"""From a plan to a response: generations that run together, their updates as one answer, whole or as a
stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.core.data import Completion, Update
from outrider.core.errors import OutriderError
from outrider.server.answers.choice import Answer, Choice, estimate_of
from outrider.server.errors import Problem, internal_error, problem_of
from outrider.server.jobs import Job
from outrider.server.keys import Caller, TokenUsage
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.service import Service, caller_of

_Result = TypeVar("_Result")

_QUIET_S = 15.0
"""After such a silence a comment is sent, so that no proxy closes the connection."""


class GenerationJobs:
    """Running generations, one for each choice of a plan. `close` cancels those that still run;
    it is called whatever happened. What was generated until then counts against the caller's limits."""

    def __init__(self, service: Service, plan: GenerationPlan, caller: Caller) -> None:
        self.service = service
        self.plan = plan
        self.jobs: list[Job] = []
        self._caller = caller
        self._reserved = ExitStack()
        self._used: list[TokenUsage] = []

    async def start(self) -> None:
        """Hand all requests to the worker, or none. Raises Problem."""
        try:
            for request in self.plan.requests:
                room = self.service.context_tokens - len(request.prompt)
                longest = room if request.max_tokens is None else min(request.max_tokens, room)
                used = self._reserved.enter_context(self._caller.reserved(len(request.prompt), longest))
                self._used.append(used)
                self.jobs.append(await self.service.worker.submit(request, self._ended))
                used.prompt_tokens = len(request.prompt)
        except OutriderError as error:
            self.close()
            raise problem_of(error) from None
        except BaseException:
            self.close()
            raise

    async def updates(self) -> AsyncIterator[tuple[int, Update | None]]:
        """What each step adds to a choice, by its index, as it comes; None when that choice has ended.

        Raises Problem for a generation that failed, or that the server broke off.
        """
        iterators = [aiter(job) for job in self.jobs]
        pending = {asyncio.ensure_future(anext(it, None)): i for i, it in enumerate(iterators)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=pending.__getitem__):
                    index = pending.pop(task)
                    try:
                        update = task.result()
                    except OutriderError as error:
                        draining = self.service.worker.state().draining
                        raise _broken_off() if draining else problem_of(error) from None
                    if update is not None and update.error is not None:
                        raise problem_of(update.error)
                    if update is not None:
                        self._used[index].completion_tokens += len(update.record.tokens)
                        pending[asyncio.ensure_future(anext(iterators[index], None))] = index
                    elif self.jobs[index].completion.finish_reason == "cancelled":
                        raise _broken_off()
                    yield index, update
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _ended(self, job: Job, completion: Completion) -> None:
        """Count a generation, also one whose client has left."""
        if self.service.metrics is not None:
            estimate, _ = estimate_of(completion, self.service.policy)
            self.service.metrics.observe_request(
                completion,
                queued_s=job.queued_s,
                key=self._caller.name,
                speedup=estimate.speedup if estimate else None,
            )

    def close(self) -> None:
        """End what still runs, and let the caller pay. Closing twice is harmless."""
        for job in self.jobs:
            job.cancel()
        self._reserved.close()


def _broken_off() -> Problem:
    message = "the server is ending and broke the generation off. Try again later."
    return Problem(503, message, code="cancelled", headers={"Retry-After": "5"})


async def answer(
    service: Service,
    request: Request,
    plan: Callable[[str], GenerationPlan],
    make: Callable[[GenerationPlan, Sequence[Choice]], Answer],
    *,
    stream: bool,
) -> Response:
    """The response to a request: a JSON object, or events. `plan` gets the caller's cache namespace.
    Raises Problem."""
    caller = caller_of(request)
    try:
        planned = await service.prepared(lambda: plan(caller.name))
    except OutriderError as error:
        raise problem_of(error) from None
    batch = GenerationJobs(service, planned, caller)
    await batch.start()
    try:
        reader = planned.reader
        choices = [Choice(i, job, reader() if reader else None) for i, job in enumerate(batch.jobs)]
        result = make(planned, choices)
        if stream:
            return EventStream(_events(batch, choices, result), batch.close)
    except BaseException:
        batch.close()
        raise
    try:
        return await unless_gone(request, _whole(batch, choices, result)) or Response(status_code=499)
    finally:
        batch.close()


async def _whole(batch: GenerationJobs, choices: Sequence[Choice], result: Answer) -> Response:
    async for index, update in batch.updates():
        result.take(choices[index], update)
    return JSONResponse(result.whole())


async def _events(batch: GenerationJobs, choices: Sequence[Choice], result: Answer) -> AsyncIterator[str]:
    for data in result.first():
        yield event(data)
    try:
        async for index, update in batch.updates():
            for data in result.next(choices[index], update):
                yield event(data)
    except Exception as error:
        problem = error if isinstance(error, Problem) else internal_error("the server failed.")
        if batch.service.metrics is not None:
            batch.service.metrics.observe_error(problem.status, problem.code)
        yield event(result.failed(problem.body))
        if not isinstance(error, Problem):
            raise
        return
    if result.done:
        yield f"data: {result.done}\n\n"


def event(data: dict[str, Any]) -> str:
    """One server-sent event, named after the type of typed ones."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {data['type']}\ndata: {text}\n\n" if "type" in data else f"data: {text}\n\n"


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
