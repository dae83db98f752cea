"""llama-server's own endpoints. Its slots are room for one request that generates each; to save, restore and
erase, they are the caller's own texts whose KV is stored, the last used first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from outrider.core.errors import BackendError, InputError
from outrider.core.files import reason_of
from outrider.core.saved import SavedState
from outrider.engine.tiers import Folder, SavedText, Unusable
from outrider.server.answers.llama import LlamaAnswer
from outrider.server.documented import ANSWER, ANSWER_OR_EVENTS, errors_as
from outrider.server.errors import Problem, invalid_field
from outrider.server.generation import answer
from outrider.server.models import Models
from outrider.server.prepare.chat import rendered
from outrider.server.prepare.llama import plan_infill, plan_llama
from outrider.server.protocol import answers_of_others as answers
from outrider.server.protocol.llama import InfillRequest, LlamaRequest, SlotRequest
from outrider.server.protocol.requests import ChatRequest
from outrider.server.service import Service, caller_of

_Answer = dict[str, Any]
_Result = TypeVar("_Result")
_LISTED = answers.LlamaCompletion | list[answers.LlamaCompletion]


def llama_router(models: Models) -> APIRouter:
    """Text to be continued, as llama-server; with `stream`, as server-sent events. What it says of itself."""
    router = APIRouter(tags=["llama-server"], responses=errors_as(answers.LlamaError) | ANSWER)

    @router.post("/completion", response_model=_LISTED, responses=ANSWER_OR_EVENTS)
    @router.post("/completions", response_model=_LISTED, responses=ANSWER_OR_EVENTS)
    async def completion(body: LlamaRequest, request: Request) -> Response:
        """Continue texts as they stand, as llama-server; several prompts or choices give a list."""
        return await answer(models, request, body, plan_llama, LlamaAnswer)

    @router.post("/infill", response_model=_LISTED, responses=ANSWER_OR_EVENTS)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill a gap between two texts, with a model that can."""
        return await answer(models, request, body, plan_infill, LlamaAnswer)

    @router.post("/apply-template", response_model=answers.AppliedTemplate)
    async def apply_template(body: ChatRequest) -> Any:
        """The prompt that a request for a chat completion becomes."""
        async with models.serving(body.model) as service:
            text, _ = await service.prepared(lambda: rendered(service, body))
            return {"prompt": "".join(service.controls.split(text))}

    @router.get("/props", response_model=answers.Props)
    async def props(model: str | None = None) -> Any:
        """A model's settings, as far as clients need them."""
        async with models.serving(model) as service:
            return _props(service)

    return router


def _props(service: Service) -> dict[str, Any]:
    template, sampling = service.template, service.defaults
    params = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "default_generation_settings": {"n_ctx": service.context_tokens, "params": params},
        "total_slots": service.worker.state().max_running,
        "model_alias": service.name,
        "model_path": service.session.target.name,
        "chat_template": template.source if template else "",
        "bos_token": template.bos if template else "",
        "eos_token": template.eos if template else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": service.fingerprint,
        "is_sleeping": False,
    }


def slots_router(models: Models) -> APIRouter:
    """What the slots are doing. Nothing of a request's text or settings is shown."""
    router = APIRouter(responses=errors_as(answers.LlamaError) | ANSWER)

    @router.get("/slots", response_model=list[answers.Slot], tags=["state"])
    async def slots(model: str | None = None, fail_on_no_slot: str | None = None) -> Any:
        """The slots of a loaded model; with `fail_on_no_slot` an error (503) where none is free."""
        service = models.loaded(model)
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

    @router.post(
        "/slots/{slot}",
        response_model=answers.SlotAction,
        response_model_exclude_none=True,
        tags=["llama-server"],
    )
    async def act(
        request: Request,
        slot: int,
        action: Literal["save", "restore", "erase"],
        body: Annotated[SlotRequest, Body(default_factory=SlotRequest)],
    ) -> Any:
        """Save a text's KV to a file, restore it, or forget it. Slot 0 is the caller's last text."""
        async with models.serving(body.model) as service:
            return await _ACTIONS[action](service, slot, body, caller_of(request).namespace)

    return router


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
    """What a function makes of the sequence of a caller's text, in the engine's thread."""

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
    """Where a caller's file of this name is: callers have files of their own."""
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
    return {"id_slot": slot, "filename": body.filename, **counts, "timings": timings}
