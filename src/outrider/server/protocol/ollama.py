"""The requests of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from outrider.server.protocol.base import (
    WHOLE,
    CommonSampling,
    Json,
    Many,
    NumLogprobs,
    Shape,
    only,
    unsupported,
)
from outrider.server.protocol.messages import Name, Tool
from outrider.server.protocol.requests import REFUSED, GenerationRequest, Tokens

_LOADED = "Accepted, without effect: it is chosen when the server is started."


def _none_of(value: Any) -> Any:
    if value:
        raise unsupported("this server reads text alone. Leave images out")
    return value


_NoImages = Annotated[Many[Any], AfterValidator(_none_of)]


class CalledFunction(Shape):
    """The function of an earlier call."""

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class OllamaCall(Shape):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction


class OllamaMessage(Shape):
    """One turn."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str | None = None
    thinking: str | None = None
    images: _NoImages | None = None
    tool_calls: Many[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(CommonSampling):
    """How the model is run and the next token chosen."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1), WHOLE] | None = Field(
        None, description="Below 0: no limit but the server's."
    )
    num_ctx: Annotated[int, Field(ge=0), WHOLE] | None = Field(
        None, description="The context is the server's; the answer's notices say where it is smaller."
    )
    tfs_z: Annotated[float, only(1, "it is not supported")] | None = None
    num_keep: Any = Field(None, description="Accepted, without effect: nothing is cut out.")
    penalize_newline: Any = Field(None, description="Accepted, without effect: it always counts.")
    draft_num_predict: Any = Field(None, description="Accepted, without effect: what pays is drafted.")
    num_batch: Any = Field(None, description=_LOADED)
    num_gpu: Any = Field(None, description=_LOADED)
    main_gpu: Any = Field(None, description=_LOADED)
    num_thread: Any = Field(None, description=_LOADED)
    low_vram: Any = Field(None, description=_LOADED)
    f16_kv: Any = Field(None, description=_LOADED)
    numa: Any = Field(None, description=_LOADED)
    use_mmap: Any = Field(None, description=_LOADED)
    use_mlock: Any = Field(None, description=_LOADED)
    vocab_only: Any = Field(None, description=_LOADED)
    logits_all: Any = Field(None, description=_LOADED)
    embedding_only: Any = Field(None, description=_LOADED)


class OllamaFields(GenerationRequest):
    """What both endpoints for text have in common. Without `stream` the answer is a stream."""

    refused: ClassVar = REFUSED | {
        "template": "the model's own chat template is in force. Use raw, or leave it out",
        "_debug_render_only": "it is not supported. Use /apply-template",
    }

    stream: bool | None = True
    format: Literal["json", ""] | Json | None = Field(None, description='"json", or a JSON schema.')
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: Any = Field(None, description="Accepted, without effect: nothing is cut out of a conversation.")
    shift: Any = Field(None, description="Accepted, without effect: nothing is cut out of a conversation.")


class OllamaChatRequest(OllamaFields):
    """A conversation to be continued; without messages the model is loaded."""

    messages: Many[OllamaMessage] | None = None
    tools: Annotated[Many[Tool], Field(max_length=512)] | None = None


class GenerateRequest(OllamaFields):
    """A text to be answered, under the chat template unless it is `raw`; without one the model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _NoImages | None = None
    context: Tokens | Annotated[list[Any], Field(max_length=0)] | None = Field(
        None, description="That of an earlier answer, which is continued."
    )


class ShowRequest(Shape):
    """A model to be described."""

    model: str | None = None
    name: str | None = Field(None, description="The older name of `model`.")
    verbose: Any = Field(None, description="Accepted, without effect.")
    system: Any = Field(None, description="Accepted, without effect.")
    template: Any = Field(None, description="Accepted, without effect.")
    options: Any = Field(None, description="Accepted, without effect.")
