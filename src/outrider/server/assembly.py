"""A session as a web service: worker, metrics, application and everything that guards it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp

from outrider.backends.gguf import build_id
from outrider.core.params import Verification
from outrider.server import errors, routes
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.metrics import Metrics
from outrider.server.page import Page, page
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import StepView, Worker
from outrider.session import Session


def create_app(service: Service, *, page: Page | None = None, has_keys: bool = False) -> FastAPI:
    """The application: every endpoint of docs/api.md, with all errors in OpenAI's shape.

    `page` is shown at /; `/metrics` is there where the service has metrics. `has_keys` says in the OpenAPI
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
    app.state.metrics = service.metrics
    errors.install(app)
    guarded = [Depends(HTTPBearer(auto_error=False, description="An API key."))] if has_keys else []
    app.include_router(routes.text_router(service), dependencies=guarded)
    app.include_router(routes.info_router(service), dependencies=guarded)
    app.include_router(routes.open_router(service, page))
    return app


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a server runs: `app` is to be served, the worker's thread runs already. Close it in the end."""

    app: ASGIApp
    worker: Worker
    service: Service
    metrics: Metrics | None

    @classmethod
    def start(
        cls,
        session: Session,
        settings: ServeSettings,
        ring: KeyRing,
        verification: Verification | None = None,
    ) -> Self:
        """Serve this session, which stays its owner's. Raises SettingError."""
        metrics: Metrics | None = None

        def observe(view: StepView) -> None:
            if metrics is not None:
                metrics.observe_steps(view)

        worker = Worker(
            session, max_waiting=settings.max_waiting, observe=observe if settings.metrics else None
        )
        if settings.metrics:
            metrics = Metrics(
                worker.state,
                model={"name": session.target.name, "context_tokens": str(session.target.context_length)},
                build={"version": version("outrider"), "llama_cpp": build_id()},
            )
        service = Service(session, worker, settings, verification=verification, metrics=metrics)
        app = create_app(service, page=page() if settings.page else None, has_keys=bool(ring))
        observe_error = metrics.observe_error if metrics else None
        worker.start()
        return cls(protect(app, settings, ring, observe_error=observe_error), worker, service, metrics)

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        self.worker.stop()
        self.service.close()
