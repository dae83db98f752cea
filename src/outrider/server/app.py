"""The web application over a service."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from outrider.server import handlers
from outrider.server.page import Page
from outrider.server.routes.chat import chat_router
from outrider.server.routes.completions import completions_router
from outrider.server.routes.health import health_router, metrics_router
from outrider.server.routes.models import models_router
from outrider.server.routes.page import page_router
from outrider.server.routes.responses import responses_router
from outrider.server.routes.status import status_router
from outrider.server.routes.tokens import tokens_router
from outrider.server.service import Service

__all__ = ["create_app"]


def create_app(service: Service, *, page: Page | None = None, has_keys: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in OpenAI's shape.

    `page` is shown at /; `/metrics` is there where the service has a meter. `has_keys` says in the OpenAPI
    document that requests need a key; `server.guard.protect`, around the application, asks for it and
    leaves who calls in `request.state.caller`. The document is at /openapi.json; there are no pages about
    it, since these would load scripts from elsewhere.
    """
    app = FastAPI(
        title="Outrider",
        summary="An OpenAI-compatible API with speculative decoding.",
        version=version("outrider"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.meter = service.meter
    handlers.install(app)
    guarded = [Depends(HTTPBearer(auto_error=False, description="An API key."))] if has_keys else []
    for make in (
        chat_router,
        completions_router,
        responses_router,
        tokens_router,
        models_router,
        status_router,
    ):
        app.include_router(make(service), dependencies=guarded)
    app.include_router(health_router(service))
    if service.meter is not None:
        app.include_router(metrics_router(service.meter))
    if page is not None:
        app.include_router(page_router(page))
    return app
