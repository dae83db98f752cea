"""Models as a web service: the application, and what guards it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from outrider.server import errors
from outrider.server.apis import anthropic, chat, completions, info, llama, ollama, responses
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.models import Models
from outrider.server.service import Service
from outrider.server.settings import ServeSettings

_ROUTERS = [api.router for api in (chat, completions, responses, anthropic, llama, ollama, info)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "An error of the request: the message says the way out."},
    "5XX": {"description": "The server failed, is shutting down or is not ready."},
}


def create_app(served: Service | Models, *, page: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in the shape of its API, and the page
    at /, if it is to be there. `server.guard.protect`, around it, leaves who calls in `request.state.caller`.
    The OpenAPI document is at /openapi.json; there are no pages about it, since these would load scripts
    from elsewhere."""
    models = served if isinstance(served, Models) else Models.of(served)
    app = FastAPI(
        strict_content_type=False,  # foreign pages are refused by their origin (guard)
        title="Outrider",
        summary="An OpenAI-compatible API with speculative decoding.",
        version=version("outrider"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
    )
    app.state.models = models
    errors.install(app, models.metrics.observe_error)
    for router in (*_ROUTERS, *([info.page_router] if page else [])):
        app.include_router(router)
    return app


def assemble(models: Models, settings: ServeSettings, ring: KeyRing) -> ASGIApp:
    """The guarded application for these models."""
    app = create_app(models, page=settings.page)
    return protect(app, settings, ring, observe_error=models.metrics.observe_error)
