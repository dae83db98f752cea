"""llama-server's slots: here each is room for one request that generates."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from outrider.server.errors import Problem
from outrider.server.models import Models
from outrider.server.protocol import answers


def slots_router(models: Models) -> APIRouter:
    """What the slots are doing. Nothing of a request's text or settings is shown."""
    router = APIRouter()

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

    return router
