"""The models of a server, by the names that clients call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.server.errors import Problem
from outrider.server.metrics import Metrics
from outrider.server.service import Service


class Models:
    """What is served: one model, as long as the server runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def metrics(self) -> Metrics | None:
        """What is counted; None where nothing is."""
        return self._service.metrics

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the models."""
        return self._service.names

    def check(self, name: str | None) -> None:
        """Raises Problem (404) for a model that is not served here."""
        if name is not None and name not in self.names and not self._service.settings.any_model:
            message = f"there is no model {name[:200]} here. Say {' or '.join(self.names)}, or nothing."
            raise Problem(404, message, code="model_not_found", param="model")

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[Service]:
        """The service of a model, loaded, for as long as requests are prepared and handed in; None is the
        first model. Raises Problem."""
        self.check(name)
        yield self._service

    def loaded(self, name: str | None = None) -> Service:
        """The service of a model (None: of the first). Raises Problem."""
        self.check(name)
        return self._service

    def services(self) -> tuple[Service, ...]:
        """Of the models that are loaded."""
        return (self._service,)
