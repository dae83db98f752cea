"""GET /health, and /metrics where there are any."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.problems import Problem
from outrider.server.routes.documents import describe
from outrider.server.service import Meter, Service
from outrider.server.shapes.answers import Health

__all__ = ["health_router", "metrics_router"]


def health_router(service: Service) -> APIRouter:
    """Whether the server takes requests."""
    router = APIRouter(tags=["state"])

    @router.get("/health", responses=describe(), response_model=Health)
    async def health() -> Any:
        """`ok`, or an error (503) when the server is ending, or its engine has failed."""
        state = service.worker.state()
        if state.failed:
            raise Problem(503, "the engine has failed. Restart the server.", code="engine_failed")
        if state.draining:
            message = "the server is ending. Ask another one."
            raise Problem(503, message, code="draining", headers={"Retry-After": "5"})
        return {"status": "ok"}

    return router


def metrics_router(meter: Meter) -> APIRouter:
    """Metrics for Prometheus."""
    router = APIRouter(tags=["state"])
    text: dict[str, Any] = {
        "content": {"text/plain": {"schema": {"type": "string"}}},
        "description": "Metrics.",
    }

    @router.get("/metrics", responses=describe() | {200: text}, response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counters and histograms, in the format that the Accept header prefers."""
        content, content_type = meter.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    return router
