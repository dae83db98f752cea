"""The models of a server, by name. Of several, those that are asked for are loaded; where there are too many,
the least recently used one makes room."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection

from outrider.core.errors import OutOfMemory, OutriderError
from outrider.server.errors import Problem
from outrider.server.metrics import Metrics
from outrider.server.service import Service
from outrider.server.worker import WorkerState

_log = logging.getLogger("outrider.server")

_LOOK_S = 0.05
"""between checks whether a model that has to make room is idle"""
_WATCH_S = 1.0
"""between checks whether a model was idle for long"""
_RETRY_S = 2.0
_ARENA_MAX, _MAX_HEAPS = -8, 2
"""a setting of glibc's `mallopt`, and its value"""


@dataclass(eq=False, slots=True)
class Model:
    """A model that can be served. `load` is called in another thread and raises OutriderError; without it the
    model is loaded as long as the server runs."""

    names: tuple[str, ...]
    """what clients call it; the first is its own name"""
    load: Callable[[], Service] | None = None
    service: Service | None = None
    """what serves it, while it is loaded"""
    error: OutriderError | None = None
    """why it could not be loaded the last time"""
    used_s: float = 0.0
    num_preparing: int = 0
    """requests that are being prepared or handed in"""

    @property
    def state(self) -> WorkerState:
        return self.service.worker.state() if self.service else WorkerState()

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, so that it must stay loaded."""
        state = self.state
        return self.num_preparing > 0 or (state.running + state.waiting > 0 and not state.failed)


class Models:
    """The models that are served. A request that names none means the first, with `any_model` one of an
    unknown name too. At most `max_loaded` are loaded at once: another one takes the place of the least
    recently used without requests, or waits until one has none. Those that nobody has asked for in `idle_s`
    are unloaded."""

    def __init__(
        self,
        models: Sequence[Model],
        *,
        max_loaded: int = 1,
        idle_s: float | None = None,
        any_model: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self._models = models
        self._by_name = {name: model for model in reversed(models) for name in model.names}
        self._max_loaded = max_loaded
        self._idle_s = idle_s
        self._any_model = any_model
        self.metrics = metrics or Metrics()
        self.metrics.states = lambda: self.states
        self.started_unix_s = int(time.time())
        self.is_draining = False
        self._entrance = asyncio.Lock()
        """Requests for models that are not loaded pass it in the order of arrival, and wait in it."""
        self._loading: tuple[Model, asyncio.Task[Problem | None]] | None = None
        """the last model that was loaded, or still is"""
        self._leaving: Model | None = None
        """what takes no more requests, so that it can be unloaded"""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, service: Service) -> Models:
        """One model, which is loaded as long as the server runs."""
        model = Model(service.names, service=service)
        return cls([model], any_model=service.settings.any_model, metrics=service.metrics)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the models."""
        return tuple(name for model in self._models for name in model.names)

    @property
    def first_names(self) -> tuple[str, ...]:
        """The models, each by its own name."""
        return tuple(model.names[0] for model in self._models)

    def _find(self, name: str | None) -> Model:
        if name is None:
            return self._models[0]
        model = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))  # Ollama's tag
        if model is None and not self._any_model:
            message = f"there is no model {name[:200]} here. Use {' or '.join(self.names)}, or omit model."
            raise Problem(404, message, code="model_not_found", param="model")
        return model or self._models[0]

    def loaded(self, name: str | None = None) -> Service | None:
        """The service of a model (None: of the first); None where it is not loaded. Raises Problem (404) for
        a model that is not served here."""
        return self._find(name).service

    def card(self, name: str | None) -> dict[str, Any]:
        """The model card of a name. Raises Problem (404)."""
        model = self._find(name)
        service = model.service
        loads = self._loading is not None and self._loading[0] is model and not self._loading[1].done()
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": service.started_unix_s if service else self.started_unix_s,
            "owned_by": "outrider",
            "root": model.names[0],
            "status": {"value": "loading" if loads else "loaded" if service else "unloaded"},
        }
        if service is not None:
            card["max_model_len"] = service.context_tokens
        if model.error is not None:
            card["status"] |= {"failed": True, "why": model.error.why}
        return card

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[Service]:
        """The service of a model, loaded on demand, while requests are prepared and submitted; it stays
        loaded until they have ended. Raises Problem: 404 for a model that is not served here, 503 for one
        that cannot be loaded."""
        model = self._find(name)
        if not self._serves(model):
            async with self._entrance:
                if self._loading is not None:  # perhaps for a client that has left
                    await asyncio.wait([self._loading[1]])
                if not self._serves(model):
                    self._loading = model, asyncio.create_task(self._load(model))
                    if problem := await asyncio.shield(self._loading[1]):
                        raise problem
        model.num_preparing += 1
        try:
            assert model.service is not None, "what serves is loaded"
            yield model.service
        finally:
            model.num_preparing -= 1
            model.used_s = time.monotonic()

    def _serves(self, model: Model) -> bool:
        """Whether a model takes requests. One whose engine has failed is loaded anew."""
        is_loaded = model.service is not None and model is not self._leaving
        return model.load is None or (is_loaded and not model.state.failed)

    @property
    def _loaded(self) -> list[Model]:
        """The least recently used one without requests comes first."""
        loaded = [model for model in self._models if model.service]
        return sorted(loaded, key=lambda model: (model.is_busy, model.used_s))

    @property
    def _services(self) -> list[Service]:
        return [model.service for model in self._models if model.service]

    @property
    def has_failed(self) -> bool:
        """Whether only a restart helps: an engine has failed whose model no request loads anew."""
        return any(model.load is None and model.state.failed for model in self._models)

    @property
    def states(self) -> list[WorkerState]:
        """How busy the loaded models are."""
        return [service.worker.state() for service in self._services]

    async def _load(self, model: Model) -> Problem | None:
        """Load a model, when there is room for it. A problem is returned, for its client may have left."""
        await self._unload(model)  # one that has failed
        try:
            while len(loaded := self._loaded) >= self._max_loaded:
                self._leaving = loaded[0]
                if not self._leaving.is_busy:
                    await self._unload(self._leaving)
                elif self.is_draining:
                    return Problem(503, "the server is shutting down. Try another one.", code="draining")
                else:
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._leaving = None
        fields = {"model": model.names[0]}
        _log.info("loading", extra={"fields": fields})
        assert model.load is not None, "others are always loaded"
        while model.service is None:
            try:
                model.service = await asyncio.to_thread(model.load)
            except OutriderError as error:
                idle = [other for other in self._loaded if not other.is_busy]
                if isinstance(error, OutOfMemory) and idle:
                    await self._unload(idle[0])
                    continue
                model.error = error
                _log.error("not loaded", extra={"fields": fields | {"why": str(error)}})
                # What the error is about is a file of the server's, which a client does not have.
                why = f"{model.names[0]} cannot be loaded: {error.why}. The server's log may say more."
                return Problem(503, why, code="model_not_loaded", retry_after_s=_RETRY_S)
        model.error, model.used_s = None, time.monotonic()
        model.service.start()
        _log.info("loaded", extra={"fields": fields})
        if self._idle_s is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch(self._idle_s))
        return None

    async def _unload(self, model: Model) -> None:
        if model.service is None:
            return
        held, model.service = [model.service], None
        _log.info("unloading", extra={"fields": {"model": model.names[0]}})
        await asyncio.to_thread(_free, held)

    async def _watch(self, idle_s: float) -> None:
        """Unload models that were idle for so long, until cancelled."""
        while True:
            await asyncio.sleep(min(_WATCH_S, idle_s / 4))
            async with self._entrance:
                for model in self._loaded:
                    if model.is_busy:
                        model.used_s = time.monotonic()
                    elif time.monotonic() - model.used_s >= idle_s:
                        await self._unload(model)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the others, at most so long; then they are cancelled."""
        self.is_draining = True
        await asyncio.gather(*(service.worker.drain(timeout_s) for service in self._services))

    def close(self) -> None:
        """End the services and free their models. Closing twice is harmless."""
        for service in self._services:
            service.close()


def models_of(request: HTTPConnection) -> Models:
    """The models of the application that a request came to."""
    models: Models = request.app.state.models
    return models


def keep_few_heaps() -> None:
    """Limit glibc's allocator to two heaps from now on. Else each of the first threads gets its own, and the
    gaps between freed blocks of one model's threads are lost to the next model. No effect without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, _MAX_HEAPS)


def _free(held: list[Service]) -> None:
    """Close a model that nothing else holds, and return its memory to the system: grammars and tokenizers are
    in reference cycles, and the allocator keeps freed memory."""
    held.pop().close()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
