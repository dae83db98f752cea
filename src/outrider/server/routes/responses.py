"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from outrider.server.answers.responses import ResponseAnswer
from outrider.server.batch import Batch
from outrider.server.prepare.responses import plan_response
from outrider.server.problems import Problem
from outrider.server.routes.answering import choices_of, failure, start
from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes import answers
from outrider.server.shapes.responses import ResponseRequest
from outrider.server.streams import EventStream, event, unless_gone

__all__ = ["responses_router"]


def responses_router(service: Service) -> APIRouter:
    """Continue a conversation, in OpenAI's newer terms."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/responses", responses=describe(answers.Response, streams=True))
    async def responses(asked: ResponseRequest, request: Request) -> Response:
        """Continue a conversation; with `stream`, as typed events. Nothing is stored."""
        batch = await start(service, request, partial(plan_response, service, asked))
        try:
            [choice] = choices_of(batch)
            made = ResponseAnswer(service, asked, batch.plan, choice)
            if asked.stream:
                return EventStream(_events(service, batch, made), batch.close)
        except BaseException:
            batch.close()
            raise
        try:
            return await unless_gone(request, _whole(batch, made)) or Response(status_code=499)
        finally:
            batch.close()

    return router


async def _whole(batch: Batch, made: ResponseAnswer) -> Response:
    async for _, update in batch.updates():
        for _told in made.next(update):
            pass
    return JSONResponse(made.whole())


async def _events(service: Service, batch: Batch, made: ResponseAnswer) -> AsyncIterator[str]:
    for told in made.first():
        yield event(told, told["type"])
    try:
        async for _, update in batch.updates():
            for told in made.next(update):
                yield event(told, told["type"])
    except Exception as error:
        told = made.failed(failure(service, error).body)
        yield event(told, told["type"])
        if not isinstance(error, Problem):
            raise
