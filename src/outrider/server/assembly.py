"""A session as a web service: worker, metrics, application and everything that guards it."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp

from outrider.backends.gguf import build_id
from outrider.core.params import Verification
from outrider.server import errors, routes
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.metrics import Metrics
from outrider.server.models import Models
from outrider.server.page import Page, page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.session import Session


def create_app(served: Service | Models, *, page: Page | None = None, has_keys: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in OpenAI's shape.

    `page` is shown at /; `/metrics` is there where something is counted. `has_keys` says in the OpenAPI
    document that requests need a key; `server.guard.protect`, around the application, asks for it and
    leaves who calls in `request.state.caller`. The document is at /openapi.json; there are no pages about
    it, since these would load scripts from elsewhere.
    """
    models = served if isinstance(served, Models) else Models(served)
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
    app.include_router(routes.text_router(models), dependencies=guarded)
    app.include_router(routes.info_router(models), dependencies=guarded)
    app.include_router(routes.open_router(models, page))
    return app


def assemble(
    session: Session, settings: ServeSettings, ring: KeyRing, verification: Verification | None = None
) -> tuple[ASGIApp, Service]:
    """What a server is to run, and the service in it, to be started and closed. The session stays its
    owner's."""
    metrics = None
    if settings.metrics:
        metrics = Metrics(
            lambda: service.worker.state(),
            model={"name": session.target.name, "context_tokens": str(session.target.context_length)},
            build={"version": version("outrider"), "llama_cpp": build_id()},
        )
    service = Service(session, settings, verification=verification, metrics=metrics)
    app = create_app(service, page=page() if settings.page else None, has_keys=bool(ring))
    observe_error = metrics.observe_error if metrics else None
    return protect(app, settings, ring, observe_error=observe_error), service
