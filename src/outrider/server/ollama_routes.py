"""Ollama's endpoints, as far as programs that talk to it need them."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from outrider.server.answers.ollama import OllamaAnswer, now
from outrider.server.documented import ANSWER, ANSWER_OR_LINES, errors_as
from outrider.server.errors import Problem
from outrider.server.generation import answer
from outrider.server.models import Models
from outrider.server.prepare.ollama import plan_generate, plan_ollama_chat
from outrider.server.protocol import answers_of_others as answers
from outrider.server.protocol.ollama import GenerateRequest, OllamaChatRequest, OllamaFields, ShowRequest
from outrider.server.service import Service

VERSION = "0.12.6"
"""of Ollama's API: clients ask whether it is new enough for tools and thinking"""

_Body = TypeVar("_Body", bound=OllamaFields)
_NO_EMBEDDINGS = "embeddings and ranking are not served. Use another server for them."
_NO_CHANGES = "models are named when the server is started. /api/tags lists them."
_REFUSED = {
    _NO_EMBEDDINGS: (
        *("/api/embed", "/api/embeddings", "/v1/embeddings", "/embedding", "/embeddings"),
        *("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    ),
    _NO_CHANGES: ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
}
"""Endpoints of other servers that are refused by name, and why."""


def ollama_router(models: Models) -> APIRouter:
    """Text, as Ollama; unless `stream` is false, as lines of JSON. The models, as Ollama lists them."""
    router = APIRouter(tags=["Ollama"], responses=errors_as(answers.OllamaError) | ANSWER)

    @router.post("/api/chat", response_model=answers.OllamaChat, responses=ANSWER_OR_LINES)
    async def ollama_chat(body: OllamaChatRequest, request: Request) -> Response:
        """Continue a conversation, as Ollama."""
        body = _renamed(models, body)
        if not body.messages:
            return await _load(models, body, {"message": {"role": "assistant", "content": ""}})
        return await answer(models, request, body, plan_ollama_chat, OllamaAnswer)

    @router.post("/api/generate", response_model=answers.OllamaText, responses=ANSWER_OR_LINES)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a text, or fill a gap, as Ollama."""
        body = _renamed(models, body)
        if not body.prompt and not body.suffix:
            return await _load(models, body, {"response": ""})
        return await answer(models, request, body, plan_generate, OllamaAnswer)

    @router.head("/api/version", include_in_schema=False)
    @router.get("/api/version", response_model=answers.OllamaVersion)
    async def ollama_version() -> Any:
        """The version of Ollama's API that is followed."""
        return {"version": VERSION}

    @router.head("/api/tags", include_in_schema=False)
    @router.get("/api/tags", response_model=answers.OllamaModels)
    async def tags() -> Any:
        """The models, under all their names."""
        return {"models": [_listed(models, name) for name in models.names]}

    @router.get("/api/ps", response_model=answers.OllamaModels)
    async def ps() -> Any:
        """The models that are loaded."""
        loaded = [name for name in models.first_names if models.loaded(name)]
        never = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0}
        return {"models": [_listed(models, name) | never for name in loaded]}

    @router.post("/api/show", response_model=answers.OllamaShow)
    async def show(body: ShowRequest) -> Any:
        """What is known of a model."""
        async with models.serving(_own_name(models, body.model or body.name)) as service:
            return _shown(service)

    return router


def refusing_router() -> APIRouter:
    """What other servers have and this one does not: refused by name."""
    router = APIRouter()
    for why, paths in _REFUSED.items():
        for path in paths:
            router.add_api_route(path, _refusal(why), methods=["POST", "DELETE"], include_in_schema=False)
    return router


def _refusal(why: str) -> Any:
    async def refuse(request: Request) -> Response:
        raise Problem(400, f"{request.url.path}: {why}", code="unsupported")

    return refuse


def _own_name(models: Models, name: str | None) -> str | None:
    """The name without the tag that Ollama's clients add to names."""
    return name if name is None or name in models.names else name.removesuffix(":latest")


def _renamed(models: Models, body: _Body) -> _Body:
    return body.model_copy(update={"model": _own_name(models, body.model)})


async def _load(models: Models, body: OllamaFields, nothing: dict[str, Any]) -> Response:
    """A request for no text: the model is loaded."""
    async with models.serving(body.model) as service:
        head = {"model": body.model or service.name, "created_at": now()}
        return JSONResponse(head | nothing | {"done": True, "done_reason": "load"})


def _listed(models: Models, name: str) -> dict[str, Any]:
    service = models.loaded(name)
    card = service.card if service else None
    size = card.file_bytes if card else 0
    since_s = card.path.stat().st_mtime if card and card.path.exists() else models.started_unix_s
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(since_s, UTC).isoformat(),
        "size": size,
        "digest": sha256(f"{name} {size}".encode()).hexdigest(),
        "details": _details(service),
        **({"context_length": service.context_tokens} if service else {}),
    }


def _details(service: Service | None) -> dict[str, Any]:
    card = service.card if service else None
    family = card.architecture if card else ""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{card.parameters / 1e9:.1f}B" if card else "",
        "quantization_level": card.quantization if card else "",
    }


def _shown(service: Service) -> dict[str, Any]:
    card, template = service.card, service.template
    able = {
        "completion": True,
        "tools": template is not None,
        "insert": service.infill is not None,
        "thinking": service.format.reasons,
    }
    info: dict[str, Any] = {}
    if card is not None:
        family = card.architecture
        info = {
            "general.architecture": family,
            "general.basename": card.name,
            "general.parameter_count": card.parameters,
            f"{family}.context_length": service.context_tokens,
            f"{family}.block_count": card.block_count,
            f"{family}.embedding_length": card.embedding_length,
        }
    return {
        "modelfile": f"FROM {service.name}\n",
        "parameters": "",
        "template": template.source if template else "",
        "details": _details(service),
        "model_info": info,
        "capabilities": [name for name, is_able in able.items() if is_able],
        "modified_at": datetime.fromtimestamp(service.started_unix_s, UTC).isoformat(),
    }
