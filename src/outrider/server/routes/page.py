"""GET /: the web page."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.page import Page

__all__ = ["page_router"]


def page_router(page: Page) -> APIRouter:
    """The page, for people; programs find nothing in it."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show(request: Request) -> Response:
        """The page, or word that the browser has it already."""
        if page.is_current(request.headers.get("if-none-match")):
            return Response(status_code=304, headers=dict(page.headers))
        return Response(page.body, headers=dict(page.headers))

    return router
