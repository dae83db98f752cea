"""llama-server's own endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.server.answers.llama import LlamaAnswer
from outrider.server.documented import ANSWER, ANSWER_OR_EVENTS, errors_as
from outrider.server.generation import answer
from outrider.server.models import Models
from outrider.server.prepare.chat import rendered
from outrider.server.prepare.llama import plan_infill, plan_llama
from outrider.server.protocol import answers_of_others as answers
from outrider.server.protocol.llama import InfillRequest, LlamaRequest
from outrider.server.protocol.requests import ChatRequest
from outrider.server.service import Service

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
