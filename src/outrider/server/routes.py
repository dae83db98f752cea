"""The endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from outrider.core.errors import InputError
from outrider.server.answers.anthropic import MessageAnswer
from outrider.server.answers.choice import spelling_of
from outrider.server.answers.responses import ResponseAnswer
from outrider.server.answers.text import ChatAnswer, CompletionAnswer
from outrider.server.documented import ANSWER, ANSWER_OR_EVENTS, ERRORS, METRICS, errors_as
from outrider.server.errors import Problem, invalid_field, problem_of
from outrider.server.generation import answer
from outrider.server.models import Models
from outrider.server.page import Page
from outrider.server.prepare.anthropic import plan_message
from outrider.server.prepare.chat import plan_chat, render, tokens_of
from outrider.server.prepare.completions import plan_completions
from outrider.server.prepare.responses import plan_response
from outrider.server.protocol import answers
from outrider.server.protocol.answers_of_others import AnthropicError
from outrider.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from outrider.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    ControlRequest,
    DetokenizeRequest,
    ModelRequest,
    ResponseRequest,
    TokenizeRequest,
)
from outrider.server.service import Service, caller_of

_MAX_CHARACTERS = 1_000_000
"""of a text for /tokenize: seconds on a core"""
_MAX_CONTROLS = 10_000
"""The time to read them grows with the square of their number: a tenth of a second for so many."""
_CALL_SIZES = 32


def text_router(models: Models) -> APIRouter:
    """Text to be continued; with `stream`, as server-sent events."""
    router = APIRouter(tags=["text"], responses=ERRORS | ANSWER_OR_EVENTS)

    @router.post("/v1/chat/completions", response_model=answers.ChatCompletion)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Continue a conversation; with `stream`, as server-sent events."""
        return await answer(models, request, body, plan_chat, ChatAnswer)

    @router.post("/v1/chat/completions/control", response_model=answers.Done)
    async def control(body: ControlRequest, request: Request) -> Any:
        """End the reasoning of an answer that runs: of a chat, a response or a message."""
        caller, names = caller_of(request).name, {body.id, body.id.rpartition("-")[2].rpartition("_")[2]}
        running = [service.thinking.get((caller, name)) for service in models.services() for name in names]
        if not any(running):
            why = "there is no such answer that may reason. Give its id, or the X-Request-Id of its request."
            raise Problem(404, f"id: {why}", code="not_found", param="id")
        for end in filter(None, running):
            end()
        return {"success": True}

    @router.post("/v1/completions", response_model=answers.Completions)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts as they stand; with `stream`, as server-sent events."""
        return await answer(models, request, body, plan_completions, CompletionAnswer)

    @router.post("/v1/responses", response_model=answers.Response)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Continue a conversation; with `stream`, as typed events. Nothing is stored."""
        return await answer(models, request, body, plan_response, ResponseAnswer)

    @router.post("/v1/messages", response_model=answers.AnthropicMessage, responses=errors_as(AnthropicError))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Continue a conversation, as Anthropic's API; with `stream`, as typed events."""
        return await answer(models, request, body, plan_message, MessageAnswer)

    @router.post(
        "/v1/messages/count_tokens", response_model=answers.InputTokens, responses=errors_as(AnthropicError)
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        """The tokens of a conversation, as Anthropic's API."""
        async with models.serving(body.model) as service:
            plan = await service.prepared(lambda: plan_message(service, body, ""))
            return JSONResponse({"input_tokens": len(plan.requests[0].prompt)})

    return router


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    if body.tokens:
        service.check_tokens(body.tokens, "tokens")
    text = service.text_of(body.tokens)
    return {"content": text, "prompt": text}


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise invalid_field("content", "give exactly one of content, prompt and messages.")
    try:
        tokens = _tokens(service, body)
    except InputError as error:
        raise problem_of(error, given[0]) from None
    shown = tokens if body.with_pieces or body.return_token_strs else []
    pieces = [spelling_of(token, service.vocabulary) for token in shown]
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_tokens}
    if body.with_pieces:
        found["tokens"] = [{"id": t, "piece": _piece(piece)} for t, piece in zip(tokens, pieces, strict=True)]
    if body.return_token_strs:
        found["token_strs"] = [piece.decode("utf-8", errors="replace") for piece in pieces]
    return found


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return tokens_of(service, render(service, body.messages, [], "none", {}))
    name, text = ("content", body.content or "") if body.prompt is None else ("prompt", body.prompt)
    if len(text) > _MAX_CHARACTERS:
        raise invalid_field(name, f"it has more than {_MAX_CHARACTERS:,} characters. Send it in parts.")
    given = body.add_special if body.add_special is not None else body.add_special_tokens
    add_special = given if given is not None else name == "prompt"
    parse_special = body.parse_special is not False
    if parse_special and service.controls.count(text) > _MAX_CONTROLS:
        why = f"it spells more than {_MAX_CONTROLS:,} control tokens."
        raise invalid_field(name, f"{why} Say parse_special: false, or shorten it.")
    return service.vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def info_router(models: Models) -> APIRouter:
    """Text to tokens and back, what is served, and what calls cost."""
    router = APIRouter(responses=ERRORS | ANSWER)

    # Millions of tokens take seconds to write down, too, so that the answer is made beside the event loop.

    @router.post("/tokenize", response_model=answers.TokenizeAnswer, tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation under the model's chat template."""
        async with models.serving(body.model) as service:
            return await service.prepared(lambda: JSONResponse(_tokenize(service, body)))

    @router.post("/detokenize", response_model=answers.DetokenizeAnswer, tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens; control tokens add nothing."""
        async with models.serving(body.model) as service:
            return await service.prepared(lambda: JSONResponse(_detokenize(service, body)))

    @router.get(
        "/v1/models", response_model=answers.ModelList, response_model_exclude_unset=True, tags=["models"]
    )
    async def list_models() -> Any:
        """The models, under all their names, and which of them are loaded."""
        return {"object": "list", "data": [models.card(name) for name in models.names]}

    @router.get(
        "/v1/models/{model:path}",
        response_model=answers.ModelCard,
        response_model_exclude_unset=True,
        tags=["models"],
    )
    async def show_model(model: str) -> Any:
        """The model of this name."""
        return models.card(model)

    @router.get("/outrider/status", response_model=answers.Status, tags=["state"])
    async def status(model: str | None = None) -> Any:
        """A model, its drafters, and the seconds of a call over 1 to 32 tokens, where they are known."""
        service = models.loaded(model)
        found = {} if service is None else _status(service)
        served = {"model": models.name_of(model), "models": list(models.first_names)}
        return found | served | {"is_loaded": service is not None}

    if len(models.first_names) > 1:

        @router.post("/models/load", response_model=answers.Done, tags=["models"])
        async def load(body: ModelRequest) -> Any:
            """Load a model before somebody asks it for something; for keys with admin = true."""
            async with models.serving(body.model):
                return {"success": True}

        @router.post("/models/unload", response_model=answers.Done, tags=["models"])
        async def unload(body: ModelRequest) -> Any:
            """Unload a model that has no requests; for keys with admin = true."""
            await models.unload(body.model)
            return {"success": True}

    return router


def _status(service: Service) -> dict[str, Any]:
    calls_s: list[float] | None = None
    if service.policy is not None and service.policy.knowledge.costs.is_known:
        # The engine's thread refines the curve; to ask it changes nothing but its own cache.
        calls_s = service.policy.knowledge.costs.calls_s(_CALL_SIZES, context=0).tolist()
    return {
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


def open_router(models: Models, page: Page | None) -> APIRouter:
    """Health, metrics where there are some, and the page for people: programs find nothing in it."""
    router = APIRouter(responses=ERRORS)

    @router.get("/health", response_model=answers.Health, tags=["state"])
    async def health() -> Any:
        """`ok`, or an error (503) when the server is ending, or its engine has failed."""
        states = [service.worker.state() for service in models.services()]
        if any(state.failed for state in states):
            raise Problem(503, "the engine has failed. Restart the server.", code="engine_failed")
        if any(state.draining for state in states):
            message = "the server is ending. Ask another one."
            raise Problem(503, message, code="draining", retry_after_s=5)
        return {"status": "ok"}

    if (collected := models.metrics) is not None:

        @router.get("/metrics", responses=METRICS, response_class=Response, tags=["state"])
        async def metrics(request: Request) -> Response:
            """Counters and histograms, in the format that the Accept header prefers."""
            content, content_type = collected.render(request.headers.get("accept", ""))
            return Response(content, headers={"content-type": content_type})

    if page is not None:

        @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
        async def show(request: Request) -> Response:
            """The page, or word that the browser has it already."""
            if page.is_current(request.headers.get("if-none-match")):
                return Response(status_code=304, headers=dict(page.headers))
            return Response(page.body, headers=dict(page.headers))

    return router
