"""POST /tokenize and /detokenize: llama.cpp's shapes, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from outrider.server.shapes.base import Body, Many
from outrider.server.shapes.messages import Message

__all__ = ["DetokenizeAnswer", "DetokenizeRequest", "Piece", "TokenizeAnswer", "TokenizeRequest"]


class TokenizeRequest(Body):
    """A text (`content` as llama.cpp has it, `prompt` as vLLM has it) or a conversation; exactly one.

    Start tokens are added to a `prompt`, and to `content` where `add_special` says so.
    """

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = Field(None, description="vLLM's name of add_special.")
    parse_special: bool | None = Field(None, description="Read control tokens that are spelled out: true.")
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class Piece(BaseModel):
    """A token and its text; its bytes where they are no text by themselves."""

    id: int
    piece: str | list[int]


class TokenizeAnswer(BaseModel):
    """The tokens, and how many there may be."""

    tokens: list[int] | list[Piece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens to be read as text."""

    tokens: Many[Annotated[int, Field(ge=0, le=2**31 - 1)]]
    model: str | None = None


class DetokenizeAnswer(BaseModel):
    """The text, under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str
