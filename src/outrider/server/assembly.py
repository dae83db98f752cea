"""A session put behind the web: worker, metrics, application and everything that guards it, in one object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Self

from starlette.types import ASGIApp

from outrider.backends.gguf import build_id
from outrider.core.params import Verification
from outrider.server.app import create_app
from outrider.server.guard import protect
from outrider.server.keys import KeyRing
from outrider.server.metrics import Metrics
from outrider.server.page import page
from outrider.server.prepare.settings import OPENAI_DEFAULTS, Limits
from outrider.server.service import Service
from outrider.server.settings import ServeSettings
from outrider.server.worker import StepView, Worker
from outrider.session import Session

__all__ = ["Assembly"]


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
        meters: list[Metrics] = []

        def observe(view: StepView) -> None:
            for meter in meters:
                meter.observe_steps(view)

        worker = Worker(
            session, max_waiting=settings.max_waiting, observe=observe if settings.metrics else None
        )
        if settings.metrics:
            meters.append(_metrics(session, worker))
        metrics = meters[0] if meters else None
        service = Service(
            session,
            worker,
            name=settings.alias,
            aliases=[session.target.name] if settings.alias else [],
            defaults=replace(
                OPENAI_DEFAULTS,
                temperature=settings.temp,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
            ),
            verification=verification,
            limits=Limits(
                max_prompt_tokens=settings.max_prompt_tokens,
                max_tokens=settings.max_tokens,
                default_max_tokens=settings.default_max_tokens,
                max_choices=settings.max_choices,
                max_schema_bytes=settings.max_schema,
            ),
            meter=metrics,
        )
        app = create_app(service, page=page() if settings.page else None, has_keys=bool(ring))
        observe_error = metrics.observe_error if metrics else None
        worker.start()
        return cls(protect(app, settings, ring, observe_error=observe_error), worker, service, metrics)

    def close(self) -> None:
        """End the threads. Closing twice is harmless."""
        self.worker.stop()
        self.service.close()


def _metrics(session: Session, worker: Worker) -> Metrics:
    names = {"model": session.target.name, "context_tokens": str(session.target.context_length)}
    build = {"version": version("outrider"), "llama_cpp": build_id()}
    return Metrics(worker.state, model=names, build=build)
