"""GET /outrider/status: what is loaded, and what calls cost here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes.answers import Status

__all__ = ["status_router"]

_CALL_SIZES = 32


def status_router(service: Service) -> APIRouter:
    """For the page, and for people."""
    router = APIRouter(prefix="/outrider", tags=["state"])

    @router.get("/status", responses=describe(), response_model=Status)
    async def status() -> Any:
        """Models, drafters, and the seconds of a call over 1 to 32 tokens; null where they are not known."""
        calls_s = _calls_s(service)
        return {
            "model": service.name,
            "draft": service.draft_name,
            "context_tokens": service.context_tokens,
            "drafters": [drafter.name for drafter in service.session.engine.drafters],
            "policy": service.policy_name,
            "bitwise": service.session.bitwise,
            "chat_format": service.format.name if service.template is not None else None,
            "plain_token_s": calls_s[0] if calls_s else None,
            "calls_s": calls_s,
            "notices": list(service.notices),
        }

    return router


def _calls_s(service: Service) -> list[float] | None:
    """A look at the curve that the engine's thread refines: it is asked, and nothing of it is changed but
    its own cache."""
    if service.policy is None or not service.policy.knowledge.costs.is_known:
        return None
    calls_s: list[float] = service.policy.knowledge.costs.calls_s(_CALL_SIZES, context=0).tolist()
    return calls_s
