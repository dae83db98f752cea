"""The requests of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.server.protocol.base import Json, Many, MaxTokens, Shape, StopText, explained, unsupported
from outrider.server.protocol.messages import Name, ToolName, type_of
from outrider.server.protocol.requests import REFUSED, Effort, GenerationRequest

_MAX_STOPS = 32
_IGNORED = "Accepted, without effect."
_OF_CHAT = "it is a field of chat completions. Say "


class _Block(Shape):
    cache_control: Any = Field(None, description="No effect: beginnings of prompts are kept by themselves.")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Any = Field(None, description=_IGNORED)


class ThinkingBlock(_Block):
    """What the assistant thought; `signature` is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block):
    """Thoughts that only another server can read: left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Block):
    """A call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]
    caller: Any = Field(None, description=_IGNORED)


class ToolResultBlock(_Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = Field(None, description="The text is then given to the model as an error's.")


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        type_of,
        custom_error_type="unsupported",
        custom_error_message="text, thinking, tool_use and tool_result are read. Leave other blocks out",
    ),
]


class TurnOutput(Shape):
    """How much the model is to think from a turn on."""

    effort: Effort | None = None


_BLOCKS = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}
"""The blocks that a turn of each role may have."""


class Turn(Shape):
    """One turn of the conversation. What the role `system` says may be for the turn before it alone, and its
    `output_config` is for the answers after it."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutput | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Turn:
        for block in self.blocks:
            if block.type not in _BLOCKS[self.role]:
                raise unsupported(f"{block.type} is no block of the role {self.role}. Leave it out")
        if self.role != "system":
            if self.content is None:
                raise unsupported("it says nothing. Give it content", "content")
            for field in ("clear_at", "output_config"):
                if getattr(self, field) is not None:
                    raise unsupported("it is for the role system. Leave it out", field)
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """Its content, where that is in blocks."""
        return self.content if self.content and not isinstance(self.content, str) else ()


class CustomTool(Shape):
    """A tool that the model may call; `input_schema` is a JSON schema of its arguments."""

    type: Annotated[
        Literal["custom"] | None, explained("this server runs no tools of its own: {}. Give custom ones")
    ] = None
    name: ToolName
    description: str | None = None
    input_schema: Json
    strict: bool | None = None
    cache_control: Any = Field(None, description=_IGNORED)
    eager_input_streaming: Any = Field(None, description=_IGNORED)
    input_examples: Any = Field(None, description=_IGNORED)
    defer_loading: bool | None = Field(None, description="No effect: all tools are given to the model.")


class Choice(Shape):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise unsupported('a name goes with {"type": "tool"}, and only with it', "name")
        return self


class Thinking(Shape):
    """Whether the model thinks before it answers, where its template knows that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of thinking, after which its end is forced."
    )
    display: Any = Field(None, description="No effect: thoughts are given as they are.")


class OutputSchema(Shape):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(TurnOutput):
    """What the answer has to be, and how much the model is to think."""

    format: OutputSchema | None = None


class ContextManagement(Shape):
    """What of a long conversation is to be left out: nothing is, and notices say so."""

    edits: Many[Json] | None = None


_ELSEWHERE = {
    "container": "this server runs no code. Leave it out",
    "mcp_servers": "this server calls no others. Leave it out",
    "output_format": "it has become output_config.format. Say that",
    "stop": f"{_OF_CHAT}stop_sequences",
    "response_format": f"{_OF_CHAT}output_config.format",
    "max_completion_tokens": f"{_OF_CHAT}max_tokens",
    "reasoning_effort": f"{_OF_CHAT}output_config.effort",
    "stream_options": "a stream always ends with its usage. Leave it out",
}


class CountTokensRequest(GenerationRequest):
    """A conversation whose tokens are to be counted: what a request for a message has, `max_tokens` aside."""

    refused: ClassVar = REFUSED | _ELSEWHERE

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Annotated[Many[CustomTool], Field(max_length=512)] | None = None
    tool_choice: Choice | None = None
    stop_sequences: Annotated[Many[StopText], Field(max_length=_MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = Field(None, description=_IGNORED)
    inference_geo: Any = Field(None, description=_IGNORED)
    metadata: Any = Field(None, description=_IGNORED)
    service_tier: Any = Field(None, description=_IGNORED)


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued."""

    max_tokens: MaxTokens
