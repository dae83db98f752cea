"""What llama-server's endpoints and Ollama's answer, and errors in the shape of others than OpenAI, for the
OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from outrider.server.protocol.answers import Account, Answer

# Errors


class LlamaErrorObject(Answer):
    """What was wrong, why, and the way out; `code` is the status."""

    message: str
    type: str
    param: str | None
    code: int


class LlamaError(Answer):
    """An error, in llama-server's shape."""

    error: LlamaErrorObject


class AnthropicErrorObject(Answer):
    """What was wrong, why, and the way out."""

    type: str
    message: str


class AnthropicError(Answer):
    """An error, in the shape of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorObject


class OllamaError(Answer):
    """An error, in the shape of Ollama's API."""

    error: str


# llama-server's


class LlamaCompletion(BaseModel):
    """The answer to POST /completion and /infill; less where `response_fields` says so."""

    model_config = ConfigDict(extra="allow")

    content: str | None = None
    stop: Literal[True] | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None


class AppliedTemplate(Answer):
    """The answer to POST /apply-template."""

    prompt: str


class Props(BaseModel):
    """The answer to GET /props."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(Answer):
    """Room for one request."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class SlotAction(Answer):
    """What became of a slot that was saved, restored or erased: its tokens, the bytes of its file, and how
    long it took."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None


# Ollama's


class _OllamaAnswer(BaseModel):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    total_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0
    outrider: Account | None = None


class OllamaChat(_OllamaAnswer):
    """The answer to POST /api/chat; durations in nanoseconds."""

    message: dict[str, Any]


class OllamaText(_OllamaAnswer):
    """The answer to POST /api/generate; `context` are the tokens of prompt and answer."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaVersion(Answer):
    """The version of the API."""

    version: str


class OllamaModel(BaseModel):
    """A name that the model is served under. `digest` tells models apart; it is not the file's hash."""

    model_config = ConfigDict(extra="allow")

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModels(BaseModel):
    """All names."""

    models: list[OllamaModel]


class OllamaShow(BaseModel):
    """What is known of a model."""

    model_config = ConfigDict(extra="allow")

    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
