"""The models of a server, by name. Of several, one is loaded at a time: the next that is asked for takes its
place when its requests have ended."""

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

from outrider.core.errors import OutriderError
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
    error: OutriderError | None = None
    """why it could not be loaded the last time"""


class Models:
    """The models that are served; `service` is of the one that is loaded. A request that names none means the
    first, with `any_model` one of an unknown name too. A model that nobody has asked for in `idle_s` is
    unloaded."""

    def __init__(
        self,
        models: Sequence[Model],
        *,
        service: Service | None = None,
        idle_s: float | None = None,
        any_model: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self._models = models
        self._by_name = {name: model for model in reversed(models) for name in model.names}
        self.service = service
        self._loaded = models[0]
        """the model that the service is of"""
        self._idle_s = idle_s
        self._used_s = 0.0
        self._any_model = any_model
        self.metrics = metrics or Metrics()
        self.started_unix_s = int(time.time())
        self.is_draining = False
        self._num_preparing = 0
        """requests that are being prepared or handed in"""
        self._entrance = asyncio.Lock()
        """Requests pass it in the order of arrival; one that needs another model waits for that in it."""
        self._loading: tuple[Model, asyncio.Task[None]] | None = None
        """the last model that was loaded, or still is"""
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, service: Service) -> Models:
        """One model, which is loaded as long as the server runs."""
        any_model = service.settings.any_model
        return cls([Model(service.names)], service=service, any_model=any_model, metrics=service.metrics)

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
        return self.service if self._find(name) is self._loaded else None

    def card(self, name: str | None) -> dict[str, Any]:
        """The model card of a name. Raises Problem (404)."""
        model, service = self._find(name), self.loaded(name)
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
        if model.load is not None:
            async with self._entrance:
                if self._loading is not None:  # perhaps for a client that has left
                    await asyncio.wait([self._loading[1]])
                if not self._serves(model):
                    self._loading = model, asyncio.create_task(self._load(model))
                    await asyncio.shield(self._loading[1])
                self._num_preparing += 1
        try:
            assert self.service is not None, "what serves is loaded"
            yield self.service
        finally:
            self._num_preparing -= model.load is not None
            self._used_s = time.monotonic()

    def _serves(self, model: Model) -> bool:
        """Whether a model takes requests. One whose engine has failed is loaded anew."""
        return self.service is not None and model is self._loaded and not self.state.failed

    @property
    def state(self) -> WorkerState:
        """How busy the loaded model is."""
        return self.service.worker.state() if self.service else WorkerState()

    @property
    def _is_busy(self) -> bool:
        state = self.state
        return self._num_preparing > 0 or (state.running + state.waiting > 0 and not state.failed)

    async def _load(self, model: Model) -> None:
        """Put a model in the place of another one, when that has no more requests. Raises Problem."""
        while self._is_busy:
            if self.is_draining:
                raise Problem(503, "the server is shutting down. Try another one.", code="draining")
            await asyncio.sleep(_LOOK_S)
        await self._unload()
        fields = {"model": model.names[0]}
        _log.info("loading", extra={"fields": fields})
        assert model.load is not None, "others are always loaded"
        try:
            self.service = await asyncio.to_thread(model.load)
        except OutriderError as error:
            model.error = error
            _log.error("not loaded", extra={"fields": fields | {"why": str(error)}})
            # What the error is about is a file of the server's, which a client does not have.
            why = f"{model.names[0]} cannot be loaded: {error.why}. The server's log may say more."
            raise Problem(503, why, code="model_not_loaded", retry_after_s=_RETRY_S) from None
        self._loaded, model.error = model, None
        self.service.start()
        _log.info("loaded", extra={"fields": fields})
        if self._idle_s is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch(self._idle_s))

    async def _unload(self) -> None:
        if self.service is None:
            return
        held, self.service = [self.service], None
        _log.info("unloading", extra={"fields": {"model": self._loaded.names[0]}})
        await asyncio.to_thread(_free, held)

    async def _watch(self, idle_s: float) -> None:
        """Unload a model that was idle for so long, until cancelled."""
        while True:
            await asyncio.sleep(min(_WATCH_S, idle_s / 4))
            async with self._entrance:
                if self._is_busy:
                    self._used_s = time.monotonic()
                elif time.monotonic() - self._used_s >= idle_s:
                    await self._unload()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait for the others, at most so long; then they are cancelled."""
        self.is_draining = True
        if self.service is not None:
            await self.service.worker.drain(timeout_s)

    def close(self) -> None:
        """End the service and free its model. Closing twice is harmless."""
        if self.service is not None:
            self.service.close()


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
