"""The models of a server, by name: loaded on demand, unloaded when they were idle for long or another one
needs their memory."""

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
from outrider.server.metrics import AllMetrics, Metrics
from outrider.server.service import Service

_log = logging.getLogger("outrider.server")

_LOOK_S = 0.05
"""between checks whether a model that has to make room is idle"""
_WATCH_S = 1.0
"""between checks for models that were idle for long"""
_RETRY_S = 2.0
_ARENA_MAX, _MAX_HEAPS = -8, 2
"""a setting of glibc's `mallopt`, and its value"""


@dataclass(eq=False, slots=True)
class Model:
    """A model that a server can load. `load` and `needed_bytes` (what it takes at most) are called in other
    threads and raise OutriderError."""

    names: tuple[str, ...]
    """what clients call it; the first is its own name"""
    load: Callable[[], Service]
    needed_bytes: Callable[[], int] = lambda: 0
    is_fixed: bool = False
    """whether it is loaded as long as the server runs"""
    service: Service | None = None
    """of one that is loaded"""
    loading: asyncio.Task[None] | None = None
    is_leaving: bool = False
    """whether it takes no more requests, so that it can be unloaded for another one"""
    error: OutriderError | None = None
    """why it could not be loaded the last time"""
    memory_bytes: int = 0
    num_waiting: int = 0
    """requests that wait until it is loaded"""
    num_preparing: int = 0
    """requests that are being prepared or handed in"""
    loaded_s: float = 0.0
    used_s: float = 0.0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def serves(self) -> bool:
        """Whether it takes requests. One whose engine has failed is loaded anew."""
        if self.service is None or self.is_fixed:
            return self.is_fixed
        return not self.is_leaving and not self.service.worker.state().failed

    @property
    def is_busy(self) -> bool:
        """Whether it must stay loaded."""
        if self.service is None:
            return False
        state = self.service.worker.state()
        return (
            self.is_fixed
            or self.num_preparing > 0
            or (state.running + state.waiting > 0 and not state.failed)
        )


class Models:
    """The models that are served. A request that names none means the first, with `any_model` one of an
    unknown name too. At most `max_loaded` are loaded at once, in `memory_bytes` (None: no limit). The least
    recently used model makes room for another one, never one with a request. Those that nobody has asked for
    in `idle_s` are unloaded."""

    def __init__(
        self,
        models: Sequence[Model],
        *,
        max_loaded: int = 1,
        memory_bytes: int | None = None,
        idle_s: float | None = None,
        any_model: bool = False,
        metrics: Metrics | AllMetrics | None = None,
    ) -> None:
        self._models = models
        self._by_name = {name: model for model in reversed(models) for name in model.names}
        self._max_loaded = max_loaded
        self._memory_bytes = memory_bytes
        self._idle_s = idle_s
        self._any_model = any_model
        self.metrics = metrics or Metrics()
        self.started_unix_s = int(time.time())
        self.is_draining = False
        self._changing: asyncio.Lock | None = None
        """held while models are loaded or unloaded: one at a time"""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, service: Service) -> Models:
        """One model, which is loaded as long as the server runs."""
        model = Model(service.names, lambda: service, is_fixed=True, service=service)
        return cls([model], any_model=service.settings.any_model, metrics=service.metrics)

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the models."""
        return tuple(name for model in self._models for name in model.names)

    @property
    def first_names(self) -> tuple[str, ...]:
        """The models, each by its own name."""
        return tuple(model.name for model in self._models)

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

    def name_of(self, name: str | None) -> str:
        """A model's own name. Raises Problem (404)."""
        return self._find(name).name

    def services(self) -> tuple[Service, ...]:
        """Of the models that are loaded."""
        return tuple(model.service for model in self._models if model.service)

    def card(self, name: str) -> dict[str, Any]:
        """The model card of a name. Raises Problem (404)."""
        model = self._find(name)
        service = model.service
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": service.started_unix_s if service else self.started_unix_s,
            "owned_by": "outrider",
            "root": model.name,
            "status": {"value": "loaded" if service else "loading" if model.loading else "unloaded"},
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
        model.num_waiting += 1
        try:
            while not model.serves:
                if model.loading is None:
                    model.loading = asyncio.create_task(self._load(model))
                    # An error that nobody waited for is logged by the task itself.
                    model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                await asyncio.shield(model.loading)  # others wait for it too
        finally:
            model.num_waiting -= 1
        model.num_preparing += 1
        try:
            assert model.service is not None, "what serves is loaded"
            yield model.service
        finally:
            model.num_preparing -= 1
            model.used_s = time.monotonic()

    def _lock(self) -> asyncio.Lock:
        self._changing = self._changing or asyncio.Lock()
        return self._changing

    async def _load(self, model: Model) -> None:
        try:
            async with self._lock():
                if model.serves:
                    return
                await self._unload(model)  # one that has failed
                model.memory_bytes = await asyncio.to_thread(model.needed_bytes)
                await self._make_room(model)
                _log.info("loading", extra={"fields": {"model": model.name}})
                while model.service is None:
                    try:
                        model.service = await asyncio.to_thread(model.load)
                    except OutOfMemory:  # of the system: idle models make room as long as there are any
                        idle = self._idle_models()
                        if not idle:
                            raise
                        await self._unload(idle[0])
                model.service.start()
                model.error, model.loaded_s = None, time.monotonic()
                model.used_s = model.loaded_s
                _log.info("loaded", extra={"fields": {"model": model.name}})
            if self._idle_s is not None and self._watching is None:
                self._watching = asyncio.create_task(self._watch(self._idle_s))
        except OutriderError as error:
            model.error = error
            _log.error("not loaded", extra={"fields": {"model": model.name, "why": str(error)}})
            # What the error is about is a file of the server's, which a client does not have.
            why = f"{model.name} cannot be loaded: {error.why}. The server's log may say more."
            raise Problem(503, why, code="model_not_loaded", retry_after_s=_RETRY_S) from None
        finally:
            model.loading = None

    async def _make_room(self, model: Model) -> None:
        """Unload others until there is room for a model. Where all have requests, the one that was loaded
        first takes no more and is unloaded when its requests have ended. Raises OutOfMemory for a model that
        never fits, and Problem when nobody waits for it any more."""
        limit = self._memory_bytes
        if limit is not None and model.memory_bytes > limit:
            needed, given = model.memory_bytes / 1e9, limit / 1e9
            why = f"it takes {needed:.1f} GB, and all models together may take {given:.1f} GB"
            raise OutOfMemory(model.name, why, "Raise --models-memory.")
        while others := [other for other in self._models if other.service and other is not model]:
            total = model.memory_bytes + sum(other.memory_bytes for other in others)
            if len(others) < self._max_loaded and (limit is None or total <= limit):
                return
            leaving = (self._idle_models() or sorted(others, key=lambda other: other.loaded_s))[0]
            leaving.is_leaving = True
            try:
                while leaving.is_busy:
                    if self.is_draining or not model.num_waiting:
                        raise Problem(503, "the server is shutting down. Try another one.", code="draining")
                    await asyncio.sleep(_LOOK_S)
                await self._unload(leaving)
            finally:
                leaving.is_leaving = False

    def _idle_models(self) -> list[Model]:
        """Models that may be unloaded, the least recently used first."""
        idle = [model for model in self._models if model.service and not model.is_busy]
        return sorted(idle, key=lambda model: model.used_s)

    async def _unload(self, model: Model) -> None:
        if model.service is None:
            return
        held, model.service = [model.service], None
        _log.info("unloading", extra={"fields": {"model": model.name}})
        await asyncio.to_thread(_free, held)

    async def _watch(self, idle_s: float) -> None:
        """Unload models that were idle for so long, until cancelled."""
        while True:
            await asyncio.sleep(min(_WATCH_S, idle_s / 4))
            for model in self._models:
                if model.is_busy:
                    model.used_s = time.monotonic()
                elif model.service and time.monotonic() - model.used_s >= idle_s:
                    async with self._lock():
                        if not model.is_busy:
                            await self._unload(model)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the others, at most so long; then they are cancelled."""
        self.is_draining = True
        await asyncio.gather(*(service.worker.drain(timeout_s) for service in self.services()))

    def close(self) -> None:
        """End the services and free their models. Closing twice is harmless."""
        for model in self._models:
            if model.service is not None:
                model.service.close()


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
