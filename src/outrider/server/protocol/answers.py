"""What is answered, for the OpenAPI document. Answers are built as plain data (`outrider.server.answers`);
the tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON object of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorObject(Answer):
    """What was wrong, why, and the way out."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """An error, in OpenAI's shape."""

    error: ErrorObject


# What an answer cost


class PromptDetails(Answer):
    """`cached_tokens`: those whose KV was kept from earlier requests."""

    cached_tokens: int
    audio_tokens: int


class CompletionDetails(Answer):
    """Of the drafts of all drafters: accepted and rejected tokens."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class DrafterAccount(Answer):
    """Tokens that one drafter offered, those that were accepted, and the target calls that this saved."""

    drafted_tokens: int
    accepted_tokens: int
    calls_saved: int


class Speedup(Answer):
    """An estimate of plain decoding's time over this answer's, with an interval."""

    speedup: float
    low: float
    high: float


class ChoiceAccount(Answer):
    """What speculation did for one choice."""

    target_calls: int
    draft_calls: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    tokens_per_target_call: float
    drafters: dict[str, DrafterAccount]
    reused_prompt_tokens: int
    times: dict[str, float]
    estimated_speedup: Speedup | None
    estimated_speedup_unknown: str | None


class Account(ChoiceAccount):
    """What speculation did. Of several choices counts add up, and of times the longest holds."""

    policy: str
    rule: str
    lossy: bool
    bitwise: bool
    notices: list[str]
    choices: list[ChoiceAccount] | None = None


# Chat completions


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


class _Generated(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    outrider: Account


class ChatCompletion(_Generated):
    """The answer to a chat request."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


# Completions and responses


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


class Completions(_Generated):
    """The continuations that were asked for."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


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


class AnthropicMessage(BaseModel):
    """The answer to POST /v1/messages: Anthropic's object, and `outrider`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]
    outrider: Account


class InputTokens(BaseModel):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


# Tokens, models and state


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


class DetokenizeAnswer(BaseModel):
    """The text, under llama.cpp's name and under vLLM's."""

    content: str
    prompt: str


class ModelStatus(Answer):
    """Whether a model is loaded: a request for it loads it. `why` it could not be loaded the last time."""

    value: Literal["unloaded", "loading", "loaded"]
    failed: bool = False
    why: str = ""


class ModelCard(Answer):
    """A name that the model is served under."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None = None
    """there where the model is loaded"""
    status: ModelStatus


class ModelList(Answer):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Answer):
    """The server takes requests."""

    status: Literal["ok"]


class Status(Answer):
    """A model, and what calls cost here where it is loaded. `models` are all that are served."""

    model: str
    models: list[str]
    is_loaded: bool
    draft: str | None = None
    context_tokens: int | None = None
    drafters: list[str] = []
    policy: str | None = None
    bitwise: bool = False
    chat_format: str | None = None
    plain_token_s: float | None = None
    calls_s: list[float] | None = None
    notices: list[str] = []


class Done(Answer):
    """Something was done that has no answer."""

    success: Literal[True]
