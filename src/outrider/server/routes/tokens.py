"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from outrider.core.errors import InputError
from outrider.server.prepare.chat import render, tokens_of
from outrider.server.problems import problem_of, wrong
from outrider.server.routes.documents import describe
from outrider.server.service import Service
from outrider.server.shapes.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

__all__ = ["tokens_router"]

_MAX_CONTROLS = 10_000
"""The time to read them grows with the square of their number: a tenth of a second for so many."""


def tokens_router(service: Service) -> APIRouter:
    """Text to tokens and back."""
    router = APIRouter(tags=["tokens"])

    # Millions of tokens take seconds to write down, too, so that the answer is made beside the event loop.

    @router.post("/tokenize", responses=describe(TokenizeAnswer))
    async def tokenize(asked: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation under the model's chat template."""
        return await service.prepared(lambda: JSONResponse(_tokenize(service, asked)))

    @router.post("/detokenize", responses=describe(DetokenizeAnswer))
    async def detokenize(asked: DetokenizeRequest) -> Response:
        """The text of tokens; what stands for structure adds nothing."""
        return await service.prepared(lambda: JSONResponse(_detokenize(service, asked)))

    return router


def _detokenize(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(asked.model)
    if asked.tokens:
        service.check_tokens(asked.tokens, "tokens")
    text = b"".join(map(service.vocabulary.piece, asked.tokens)).decode("utf-8", errors="replace")
    return {"content": text, "prompt": text}


def _tokenize(service: Service, asked: TokenizeRequest) -> dict[str, Any]:
    service.check_model(asked.model)
    given = [name for name in ("content", "prompt", "messages") if getattr(asked, name) is not None]
    if len(given) != 1:
        why = "give exactly one of content, prompt and messages."
        raise wrong("content", why)
    try:
        tokens = _tokens(service, asked)
    except InputError as error:
        raise problem_of(error, given[0]) from None
    shown = tokens if asked.with_pieces or asked.return_token_strs else []
    pieces = [service.vocabulary.piece(token) or service.vocabulary.spelling(token) for token in shown]
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.context_tokens}
    if asked.with_pieces:
        answer["tokens"] = [{"id": t, "piece": _text(piece)} for t, piece in zip(tokens, pieces, strict=True)]
    if asked.return_token_strs:
        answer["token_strs"] = [piece.decode("utf-8", errors="replace") for piece in pieces]
    return answer


def _tokens(service: Service, asked: TokenizeRequest) -> list[int]:
    if asked.messages is not None:
        return tokens_of(service, render(service, asked.messages, [], "none", {}))
    told = asked.add_special if asked.add_special is not None else asked.add_special_tokens
    special = told if told is not None else asked.prompt is not None
    text = asked.prompt if asked.prompt is not None else asked.content or ""
    reads = asked.parse_special is not False
    if reads and service.spelling.num_controls(text) > _MAX_CONTROLS:
        why = (
            f"it spells more than {_MAX_CONTROLS:,} control tokens. Say parse_special: false, or shorten it."
        )
        raise wrong("prompt" if asked.prompt is not None else "content", why)
    return service.vocabulary.tokenize(text, add_special=special, parse_special=reads)


def _text(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
