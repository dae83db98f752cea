"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes.answers import ModelCard, ModelList

__all__ = ["models_router"]


def models_router(service: Service) -> APIRouter:
    """What is served."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models", responses=describe(), response_model=ModelList)
    async def models() -> Any:
        """The model, under all its names."""
        return {"object": "list", "data": [_card(service, name) for name in (service.name, *service.aliases)]}

    @router.get("/v1/models/{model:path}", responses=describe(), response_model=ModelCard)
    async def model(model: str) -> Any:
        """The model of this name."""
        service.check_model(model)
        return _card(service, model)

    return router


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_unix_s,
        "owned_by": "outrider",
        "root": service.name,
        "max_model_len": service.context_tokens,
    }
