"""A session as a web service: worker, metrics, application and everything that guards it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp

from outrider.backends.gguf import build_id
from outrider.core.params import Verification
from outrider.server import errors, routes
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.llama_routes import llama_router, slots_router
from outrider.server.metrics import Metrics
from outrider.server.models import Models
from outrider.server.ollama_routes import ollama_router, refusing_router
from outrider.server.page import Page, page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import WorkerState
from outrider.session import Session


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
    )
    errors.install(app, models.metrics.observe_error if models.metrics else None)
    guarded = [Depends(HTTPBearer(auto_error=False, description="An API key."))] if has_keys else []
    for router in (routes.text_router, routes.info_router, llama_router, ollama_router, slots_router):
        app.include_router(router(models), dependencies=guarded)
    app.include_router(refusing_router(), dependencies=guarded)
    app.include_router(routes.open_router(models, page))
    return app


def service_of(
    session: Session, settings: ServeSettings, verification: Verification | None = None
) -> Service:
    """The service of a server's only model. The session stays its owner's."""
    metrics = None
    if settings.metrics:
        context = str(session.target.context_length)
        metrics = metrics_of(session.target.name, lambda: service.worker.state(), context_tokens=context)
    service = Service(session, settings, verification=verification, metrics=metrics)
    return service


def assemble(models: Models, settings: ServeSettings, ring: KeyRing) -> ASGIApp:
    """What a server of these models is to run."""
    app = create_app(models, page=page() if settings.page else None, has_keys=bool(ring))
    observe_error = models.metrics.observe_error if models.metrics else None
    return protect(app, settings, ring, observe_error=observe_error)


def metrics_of(name: str, state: Callable[[], WorkerState], **facts: str) -> Metrics:
    """The collectors of a model; `facts` about it become labels."""
    build = {"version": version("outrider"), "llama_cpp": build_id()}
    return Metrics(state, model={"name": name} | facts, build=build)
