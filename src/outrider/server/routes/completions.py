"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers.completions import CompletionAnswer
from outrider.server.prepare.completions import plan_completions
from outrider.server.routes.answering import answer
from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes.answers import Completions
from outrider.server.shapes.completions import CompletionRequest

__all__ = ["completions_router"]


def completions_router(service: Service) -> APIRouter:
    """Continue texts."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/completions", responses=describe(Completions, streams=True))
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue texts as they stand; with `stream`, as server-sent events."""
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return await answer(
            service,
            request,
            partial(plan_completions, service, asked),
            partial(CompletionAnswer, service, with_usage=with_usage),
            stream=bool(asked.stream),
        )

    return router
