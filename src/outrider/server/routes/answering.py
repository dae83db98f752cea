"""What the endpoints of text have in common: from a plan to a response, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.data import Update
from outrider.core.errors import OutriderError
from outrider.server.answers.choice import Choice
from outrider.server.batch import Batch
from outrider.server.prepare.plan import Plan
from outrider.server.problems import Problem, problem_of
from outrider.server.service import Service, caller_of
from outrider.server.streams import DONE, EventStream, event, unless_gone

__all__ = ["Chunked", "answer", "choices_of", "collect", "failure", "start"]


class Chunked(Protocol):
    """An answer that can be given whole or in chunks."""

    def whole(self) -> dict[str, Any]:
        """The answer when every choice has ended."""
        ...

    def first(self) -> Iterator[dict[str, Any]]:
        """What comes before any text."""
        ...

    def next(self, choice: Choice, update: Update | None) -> Iterator[dict[str, Any]]:
        """What an update of a choice gives; None: it has ended, and there is at least one chunk."""
        ...

    def last(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What is sent instead of the last chunk."""
        ...


Make = Callable[[Plan, Sequence[Choice]], Chunked]


async def start(service: Service, request: Request, plan: Callable[[str], Plan]) -> Batch:
    """Work out the plan for this caller, and start its generations. Raises Problem."""
    caller = caller_of(request)
    try:
        made = await service.prepared(lambda: plan(caller.name))
    except OutriderError as error:
        raise problem_of(error) from None
    return await Batch.start(service, made, caller)


def choices_of(batch: Batch) -> list[Choice]:
    """The choices of a batch that has begun."""
    make = batch.plan.reader
    return [Choice(i, job, make() if make else None) for i, job in enumerate(batch.jobs)]


async def collect(batch: Batch, choices: Sequence[Choice]) -> None:
    """Read everything. Raises Problem."""
    async for index, update in batch.updates():
        choices[index].take(update)


async def answer(
    service: Service, request: Request, plan: Callable[[str], Plan], make: Make, *, stream: bool
) -> Response:
    """The response to a request: a JSON object, or events that end with [DONE]. Raises Problem."""
    batch = await start(service, request, plan)
    try:
        choices = choices_of(batch)
        made = make(batch.plan, choices)
        if stream:
            return EventStream(_events(service, batch, choices, made), batch.close)
    except BaseException:
        batch.close()
        raise
    try:
        return await unless_gone(request, _whole(batch, choices, made)) or Response(status_code=499)
    finally:
        batch.close()


async def _whole(batch: Batch, choices: Sequence[Choice], made: Chunked) -> Response:
    await collect(batch, choices)
    return JSONResponse(made.whole())


async def _events(
    service: Service, batch: Batch, choices: Sequence[Choice], made: Chunked
) -> AsyncIterator[str]:
    for chunk in made.first():
        yield event(chunk)
    num_open = len(choices)
    try:
        async for index, update in batch.updates():
            chunks = list(made.next(choices[index], update))
            num_open -= update is None
            if not num_open:
                chunks[-1:] = made.last(chunks[-1])
            for chunk in chunks:
                yield event(chunk)
    except Exception as error:
        yield event(failure(service, error).body)
        if not isinstance(error, Problem):
            raise
        return
    yield DONE


def failure(service: Service, error: Exception) -> Problem:
    """What a running stream says of an error, which is counted like others."""
    found = error if isinstance(error, Problem) else Problem(500, "the server failed.", code="internal_error")
    if service.meter is not None:
        service.meter.observe_error(found.status, found.code)
    return found
