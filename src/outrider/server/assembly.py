"""A session as a web service: application, metrics, and what guards them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp

from outrider.core.params import Verification
from outrider.server import errors
from outrider.server.apis import anthropic, chat, completions, info, llama, ollama, responses
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.metrics import Metrics
from outrider.server.models import Models
from outrider.server.page import Page, page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import WorkerState

if TYPE_CHECKING:
    from outrider.session import Session

_ROUTERS = [api.router for api in (chat, completions, responses, anthropic, llama, ollama, info)]
_ERROR = {"application/json": {"schema": {"type": "object"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "An error of the request: the message says the way out.", "content": _ERROR},
    "5XX": {"description": "The server failed, is shutting down or is not ready.", "content": _ERROR},
}


def create_app(served: Service | Models, *, page: Page | None = None, has_keys: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in OpenAI's shape.

    `page` is shown at /; `/metrics` is there where something is counted. `has_keys` says in the OpenAPI
    document that requests need a key; `server.guard.protect`, around the application, asks for it and
    leaves who calls in `request.state.caller`. The document is at /openapi.json; there are no pages about
    it, since these would load scripts from elsewhere.
    """
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
    errors.install(app, models.metrics.observe_error if models.metrics else None)
    guarded = [Depends(HTTPBearer(auto_error=False, description="An API key."))] if has_keys else []
    several = [info.several_router] if len(models.first_names) > 1 else []
    for router in (*_ROUTERS, *several):
        app.include_router(router, dependencies=guarded)
    app.include_router(info.open_router)
    if models.metrics is not None:
        app.include_router(info.metrics_router)
    if page is not None:
        app.include_router(info.page_router(page))
    return app


def service_of(
    session: Session, settings: ServeSettings, verification: Verification | None = None, build: str = ""
) -> Service:
    """The service of a server's only model. The session stays its owner's; `build` is its library's."""
    metrics = None
    if settings.metrics:
        name, context = session.target.name, str(session.target.context_length)
        metrics = metrics_of(name, lambda: service.worker.state(), build, context_tokens=context)
    service = Service(session, settings, verification=verification, metrics=metrics)
    return service


def assemble(models: Models, settings: ServeSettings, ring: KeyRing) -> ASGIApp:
    """The guarded application for these models."""
    app = create_app(models, page=page() if settings.page else None, has_keys=bool(ring))
    observe_error = models.metrics.observe_error if models.metrics else None
    return protect(app, settings, ring, observe_error=observe_error)


def metrics_of(name: str, state: Callable[[], WorkerState], build: str = "", **facts: str) -> Metrics:
    """The collectors of a model; `facts` about it become labels."""
    builds = {"version": version("outrider"), "llama_cpp": build}
    return Metrics(state, model={"name": name} | facts, build=builds)
