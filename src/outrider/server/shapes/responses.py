"""POST /v1/responses: the part of it that keeps nothing."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.server.shapes.base import WHOLE, Many, Shape, explained
from outrider.server.shapes.chat import Effort, refused_everywhere
from outrider.server.shapes.grammars import JsonObjectFormat, TextFormat
from outrider.server.shapes.items import Item
from outrider.server.shapes.sampling import Harmless, SamplingFields, StreamOptions
from outrider.server.shapes.tools import ToolMode, ToolName, refuse_type

__all__ = ["FunctionTool", "NamedFunctionTool", "ResponseRequest", "SchemaFormat"]

_STATELESS = "nothing is stored here. Give the whole conversation as `input`"


class SchemaFormat(Shape):
    """JSON of a schema; `strict` as in chat completions."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Shape):
    """What the text of the answer has to be."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[
        Literal["medium"] | None, explained("it is not supported. Ask for it in a message")
    ] = None


class Reasoning(Shape):
    """How much the model is to think, where its template knows that."""

    refused: ClassVar = {
        "summary": "reasoning is given as it is, without a summary. Leave it out",
        "generate_summary": "reasoning is given as it is, without a summary. Leave it out",
    }

    effort: Effort | None = None


class FunctionTool(Shape):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        return refuse_type(data)


class NamedFunctionTool(Shape):
    """The function that has to be called."""

    type: Literal["function"]
    name: ToolName

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        return refuse_type(data)


class ResponseRequest(SamplingFields, Harmless):
    """A conversation to be continued, as items."""

    refused: ClassVar = refused_everywhere | {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": "prompts are not kept here. Give `instructions` and `input`",
        "context_management": "the conversation is not shortened here. Leave it out",
        "logprobs": 'it is a field of chat completions. Say "include": ["message.output_text.logprobs"]',
        "max_tokens": "it is a field of chat completions. Say max_output_tokens",
        "messages": "it is a field of chat completions. Say input",
        "response_format": "it is a field of chat completions. Say text.format",
    }

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        None, description="Has no effect: it is about tools that the server itself runs."
    )
    tools: Annotated[Many[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: ToolMode | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Many[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Reasoning is never encrypted: it is given as it is."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncation: Annotated[
        Literal["disabled"] | None,
        explained("the conversation is not shortened here. Say disabled, or leave it out"),
    ] = None
    store: Annotated[Literal[False] | None, explained(_STATELESS)] = None
    background: Annotated[
        Literal[False] | None, explained("nothing runs in the background here. Say false, or use stream")
    ] = None
