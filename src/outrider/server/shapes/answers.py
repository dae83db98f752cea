"""What is answered, for the OpenAPI document. Answers are built as plain data (`outrider.server.answers`);
the tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from outrider.server.shapes.accounts import Account, Answer, Usage

__all__ = [
    "ChatCompletion",
    "Completions",
    "ErrorAnswer",
    "Health",
    "ModelCard",
    "ModelList",
    "Response",
    "Status",
]


class ErrorObject(Answer):
    """What was wrong, why, and the way out."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """An error, in OpenAI's shape."""

    error: ErrorObject


class Scored(Answer):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoredToken(Scored):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[Scored]


class ChatLogprobs(Answer):
    """Every token of the answer, in order."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(Answer):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class Call(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    """The answer to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    outrider: Account


class TextLogprobs(Answer):
    """Log probabilities as lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completions(Answer):
    """The continuations that were asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    outrider: Account


class Response(BaseModel):
    """The answer to POST /v1/responses: OpenAI's object, and `outrider`."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    outrider: Account


class ModelCard(Answer):
    """A name that the model is served under."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    """The server takes requests."""

    status: Literal["ok"]


class Status(Answer):
    """What is loaded, and what calls cost here."""

    model: str
    draft: str | None
    context_tokens: int
    drafters: list[str]
    policy: str
    bitwise: bool
    chat_format: str | None
    plain_token_s: float | None
    calls_s: list[float] | None
    notices: list[str]
