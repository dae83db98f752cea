"""Text to tokens and back, what is served, health, metrics."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from outrider.core.errors import InputError
from outrider.server.apis.chat import render, tokens_of
from outrider.server.apis.shapes import Body, Json, Many, Message, Token
from outrider.server.errors import Problem, invalid_field, problem_of
from outrider.server.models import models_of
from outrider.server.service import Service

router = APIRouter()

_MAX_CHARACTERS = 1_000_000
"""of a text for /tokenize, which take seconds"""
_MAX_CONTROLS = 10_000
"""Reading takes the square of their number: a tenth of a second for this many."""
_CALL_SIZES = 32


class TokenizeRequest(Body):
    """A text (`content` as llama.cpp has it, `prompt` as vLLM has it) or a conversation; exactly one.

    Start tokens are added to a `prompt`, and to `content` where `add_special` says so. Control tokens that
    are spelled out are read, unless `parse_special` is false.
    """

    renamed: ClassVar = {"add_special_tokens": "add_special"}

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None


class DetokenizeRequest(Body):
    """Tokens whose text is wanted."""

    tokens: Many[Token]
    model: str | None = None


# Millions of tokens take seconds to write down, too, so that the answer is made beside the event loop.


@router.post("/tokenize", tags=["tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a text, or of a conversation under the model's chat template."""
    async with models_of(request).serving(body.model) as service:
        response, _ = await service.prepared(lambda: JSONResponse(_tokenize(service, body)))
        return response


@router.post("/detokenize", tags=["tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of tokens, control tokens as they are spelled."""
    async with models_of(request).serving(body.model) as service:

        def spelled() -> Response:
            service.check_tokens(body.tokens, "tokens")
            text = service.text_of(body.tokens)
            return JSONResponse({"content": text, "prompt": text})

        response, _ = await service.prepared(spelled)
        return response


def _tokenize(service: Service, body: TokenizeRequest) -> Json:
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_field("content", "give exactly one of content, prompt and messages.")
    tokens = tokens_of(service, render(service, body.messages)) if body.messages else _tokens(service, body)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_tokens}


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    name, text = ("prompt", body.prompt) if body.content is None else ("content", body.content)
    if len(text := text or "") > _MAX_CHARACTERS:
        raise invalid_field(name, f"it has more than {_MAX_CHARACTERS:,} characters. Send it in parts.")
    parse_special = body.parse_special is not False
    if parse_special and service.controls.count(text) > _MAX_CONTROLS:
        why = f"it spells more than {_MAX_CONTROLS:,} control tokens."
        raise invalid_field(name, f"{why} Use parse_special: false, or shorten it.")
    add_special = name == "prompt" if body.add_special is None else body.add_special
    try:
        return service.vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)
    except InputError as error:
        raise problem_of(error, name) from None


# Models


@router.get("/v1/models", tags=["models"])
async def list_models(request: Request) -> Any:
    """The models, under all their names, and which of them are loaded."""
    models = models_of(request)
    return {"object": "list", "data": [models.card(name) for name in models.names]}


@router.get("/v1/models/{model:path}", tags=["models"])
async def show_model(model: str, request: Request) -> Any:
    """The model of this name."""
    return models_of(request).card(model)


@router.get("/outrider/status", tags=["state"])
async def status(request: Request, model: str | None = None) -> Any:
    """A model, its drafters, and the seconds of a call over 1 to 32 tokens, where they are known."""
    models = models_of(request)
    service, name = models.loaded(model), models.card(model)["root"]
    served = {"model": name, "models": list(models.first_names), "is_loaded": service is not None}
    if service is None:
        return served | {"drafters": [], "notices": []}
    calls_s: list[float] | None = None
    if service.policy is not None and service.policy.state.costs.is_known:
        # The engine's thread refines the curve; to ask it changes nothing but its own cache.
        calls_s = service.policy.state.costs.calls_s(_CALL_SIZES, context=0).tolist()
    return served | {
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


# Health, metrics


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["state"])
async def health(request: Request) -> Any:
    """`ok`, or an error (503) when the server is ending, or its engine has failed and nothing but a restart
    helps: of several models, a failed one is loaded anew by the next request for it."""
    models = models_of(request)
    if models.has_failed:
        raise Problem(503, "the engine has failed. Restart the server.", code="engine_failed")
    if models.is_draining:
        raise Problem(503, "the server is shutting down. Try another one.", code="draining", retry_after_s=5)
    return {"status": "ok"}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse, tags=["state"])
async def metrics(request: Request) -> Response:
    """Metrics in the format that the Accept header prefers."""
    content, content_type = models_of(request).metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})
