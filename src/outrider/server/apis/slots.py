"""llama-server's slots. GET shows one for each request that may run, without its text or settings. To save,
restore and erase, slots are the caller's own texts whose KV is stored, the last used first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Body, Request
from pydantic import Field

from outrider.core.errors import BackendError, InputError
from outrider.core.files import reason_of
from outrider.core.saved import SavedState
from outrider.engine.tiers import Folder, SavedText, Unusable
from outrider.server.apis.shapes import Shape
from outrider.server.errors import Problem, invalid_field
from outrider.server.models import models_of
from outrider.server.service import Service, caller_of

router = APIRouter()

_Answer = dict[str, Any]
_Result = TypeVar("_Result")


class SlotRequest(Shape):
    """Which file of the server's folder a slot is saved to, or restored from."""

    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")] | None = None
    model: str | None = None


@router.get("/slots", tags=["state"])
async def slots(request: Request, model: str | None = None, fail_on_no_slot: str | None = None) -> Any:
    """The slots of a loaded model; with `fail_on_no_slot` an error (503) where none is free."""
    service = models_of(request).loaded(model)
    if service is None:
        return []
    state = service.worker.state()
    if fail_on_no_slot and state.running >= state.max_running:
        raise Problem(503, "no slot is free. Ask again a little later.", code="no_slot", retry_after_s=1)
    return [
        {
            "id": i,
            "id_task": -1,
            "n_ctx": service.context_tokens,
            "speculative": bool(service.session.engine.drafters),
            "is_processing": i < state.running,
        }
        for i in range(state.max_running)
    ]


@router.post("/slots/{slot}", tags=["llama-server"])
async def act(
    request: Request,
    slot: int,
    action: Literal["save", "restore", "erase"],
    body: Annotated[SlotRequest, Body(default_factory=SlotRequest)],
) -> Any:
    """Save a text's KV to a file, restore it, or forget it. Slot 0 is the caller's last text."""
    async with models_of(request).serving(body.model) as service:
        return await _ACTIONS[action](service, slot, body, caller_of(request).namespace)


async def _save(service: Service, slot: int, body: SlotRequest, scope: str) -> _Answer:
    folder, path = _file(service, body, scope)
    before = perf_counter()
    tokens, state = await _on_slot(service, slot, scope, service.session.engine.slots.saved)
    text = SavedText(folder.digest(scope), np.array(tokens, np.int32), state.extent)
    try:
        size = await service.prepared(lambda: folder.write(path, text.head(), state.parts))
    except OSError as error:
        message = f"slot: it could not be written ({reason_of(error)}). The server needs more room."
        raise Problem(507, message, code="not_written") from None
    return _done(slot, body, before, "save_ms", n_saved=len(tokens), n_written=size)


async def _restore(service: Service, slot: int, body: SlotRequest, scope: str) -> _Answer:
    folder, path = _file(service, body, scope)
    before = perf_counter()
    try:
        head, parts = await service.prepared(lambda: folder.read(path))
        text = SavedText.of(head)
        if text.scope != folder.digest(scope):
            raise Unusable("it is another key's")
        state, tokens = SavedState(text.extent, tuple(parts)), text.tokens.tolist()
        await service.worker.call(lambda: service.session.engine.slots.put(scope, tokens, state))
    except FileNotFoundError:
        raise invalid_field("filename", "there is no such file. Save one first.") from None
    except (OSError, Unusable) as error:
        why = str(error) if isinstance(error, Unusable) else reason_of(error)
        raise invalid_field("filename", f"the file is not used: {why}. Save it again.") from None
    except (InputError, BackendError) as error:
        raise _busy(error) from None
    size = sum(part.nbytes for part in parts)
    return _done(slot, body, before, "restore_ms", n_restored=len(tokens), n_read=size)


async def _erase(service: Service, slot: int, body: SlotRequest, scope: str) -> _Answer:
    del body
    return {
        "id_slot": slot,
        "n_erased": await _on_slot(service, slot, scope, service.session.engine.slots.erase),
    }


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


async def _on_slot(service: Service, slot: int, scope: str, function: Callable[[int], _Result]) -> _Result:
    """Call a function with the sequence of a caller's text, in the engine's thread."""

    def act() -> _Result:
        texts = service.session.engine.slots.texts(scope)
        if not 0 <= slot < len(texts):
            raise invalid_field("slot", f"{len(texts)} of your texts are stored. Slot 0 is the last of them.")
        return function(texts[slot])

    try:
        return await service.worker.call(act)
    except (InputError, BackendError) as error:
        raise _busy(error) from None


def _file(service: Service, body: SlotRequest, scope: str) -> tuple[Folder, Path]:
    """The path of a caller's file: callers have files of their own."""
    if service.slot_folder is None:
        message = "slots are not saved here. Start the server with --slot-save-path."
        raise Problem(501, message, code="not_supported", type="not_supported_error")
    if body.filename is None:
        raise invalid_field("filename", "it is missing. Name a file.")
    own = f".{service.slot_folder.digest(scope)[:16]}" if scope else ""
    return service.slot_folder, service.slot_folder.path / f"{body.filename}{own}.slot"


def _busy(error: Exception) -> Problem:
    return Problem(503, str(error), code="slot_busy", retry_after_s=1)


def _done(slot: int, body: SlotRequest, before_s: float, name: str, **counts: int) -> _Answer:
    timings = {name: 1000 * (perf_counter() - before_s)}
    found = {"id_slot": slot, "filename": body.filename, **counts, "timings": timings}
    return {name: value for name, value in found.items() if value is not None}
