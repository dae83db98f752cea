"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers.chat import ChatAnswer
from outrider.server.prepare.chat import plan_chat
from outrider.server.routes.answering import answer
from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes.answers import ChatCompletion
from outrider.server.shapes.chat import ChatRequest

__all__ = ["chat_router"]


def chat_router(service: Service) -> APIRouter:
    """Continue a conversation."""
    router = APIRouter(tags=["text"])

    @router.post("/v1/chat/completions", responses=describe(ChatCompletion, streams=True))
    async def chat(asked: ChatRequest, request: Request) -> Response:
        """Continue a conversation; with `stream`, as server-sent events."""
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return await answer(
            service,
            request,
            partial(plan_chat, service, asked),
            partial(ChatAnswer, service, with_usage=with_usage),
            stream=bool(asked.stream),
        )

    return router
