"""Anthropic's messages: a conversation in blocks, which becomes a request for a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from outrider.core.data import Piece
from outrider.core.notices import notify
from outrider.server.apis.answers import PartedAnswer, parsed_arguments
from outrider.server.apis.chat import ChatRequest, fitting_effort, plan_chat
from outrider.server.apis.generation import EVENTS_TOO, answer
from outrider.server.apis.messages import (
    MAX_TOOLS,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    OtherTool,
    Tool,
    ToolCall,
    ToolName,
    or_other,
    served_tools,
    text_of,
    type_of,
)
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import (
    CACHED,
    REFUSED,
    Effort,
    GenerationRequest,
    Json,
    JsonSchemaFormat,
    Many,
    MaxTokens,
    NamedSchema,
    Shape,
    StopText,
    Text,
    unsupported,
)
from outrider.server.errors import anthropic_error, renamed_fields
from outrider.server.models import models_of
from outrider.server.service import Service

router = APIRouter(tags=["text"])

_MAX_STOPS = 32
_OF_CHAT = "it is a field of chat completions. Use "


class TextBlock(Shape):
    """Text."""

    ignored: ClassVar = CACHED | {"citations"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Shape):
    """What the assistant thought; `signature` is not checked."""

    ignored: ClassVar = CACHED

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Shape):
    """Thoughts that only another server can read: left out."""

    ignored: ClassVar = CACHED

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Shape):
    """A call that the assistant made in an earlier turn."""

    ignored: ClassVar = CACHED | {"caller"}

    type: Literal["tool_use"]
    id: str
    name: Text
    input: Json


class ToolResultBlock(Shape):
    """What a call returned."""

    ignored: ClassVar = CACHED

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
    """How much the model is to think from this turn on."""

    effort: Effort | None = None


_BLOCKS = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}
"""The blocks that a turn of each role may have."""


class Turn(Shape):
    """One turn of the conversation. A system turn may end with the next user's (`clear_at`); its
    `output_config` is for the answers after it."""

    ignored: ClassVar = frozenset({"id"})

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutput | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Turn:
        for block in self.blocks:
            if block.type not in _BLOCKS[self.role]:
                raise unsupported(f"{block.type} is not a block of the role {self.role}. Leave it out")
        if self.role != "system":
            if self.content is None and self.role == "user":
                raise unsupported("it is empty. Give it content", "content")
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

    ignored: ClassVar = CACHED | {"eager_input_streaming", "input_examples", "defer_loading"}

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Json
    strict: bool | None = None


_Own = Annotated[CustomTool, Tag("own")]
_Other = Annotated[OtherTool, Tag("other")]


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
    """Whether the model thinks before it answers, where its template knows that. Thoughts are given as they
    are."""

    ignored: ClassVar = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of thinking, after which its end is forced."
    )


class OutputSchema(Shape):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(TurnOutput):
    """What the answer has to be, and how much the model is to think."""

    format: OutputSchema | None = None


class ContextManagement(Shape):
    """What to leave out of a long conversation. Nothing is left out, and notices say so."""

    edits: Many[Json] | None = None


_ELSEWHERE = {
    "container": "this server runs no code. Leave it out",
    "mcp_servers": "this server calls no others. Leave it out",
    "output_format": "it is called output_config.format now. Use that",
    "stop": f"{_OF_CHAT}stop_sequences",
    "response_format": f"{_OF_CHAT}output_config.format",
    "max_completion_tokens": f"{_OF_CHAT}max_tokens",
    "reasoning_effort": f"{_OF_CHAT}output_config.effort",
    "stream_options": "a stream always ends with its usage. Leave it out",
}


class CountTokensRequest(GenerationRequest):
    """A conversation whose tokens are to be counted: a request for a message without `max_tokens`."""

    refused: ClassVar = REFUSED | _ELSEWHERE
    ignored: ClassVar = GenerationRequest.ignored | CACHED | {"inference_geo", "metadata", "service_tier"}

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: (
        Annotated[Many[Annotated[_Own | _Other, or_other("custom")]], Field(max_length=MAX_TOOLS)] | None
    ) = None
    tool_choice: Choice | None = None
    stop_sequences: Annotated[Many[StopText], Field(max_length=_MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    metadata: Any = None


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued."""

    max_tokens: MaxTokens


@router.post("/v1/messages", responses=EVENTS_TOO)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Continue a conversation, as Anthropic's API; with `stream`, as typed events."""
    return await answer(request, body, plan_message, MessageAnswer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Any:
    """The tokens of a conversation, as Anthropic's API."""
    async with models_of(request).serving(body.model) as service:
        plan = await service.prepared(lambda: plan_message(service, body, ""))
        return {"input_tokens": len(plan.requests[0].prompt)}


# The plan

_NAMES = {
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "reasoning_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
}
"""What the fields of a chat request are called here."""
_FOR_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins the system prompt with it. It differs in each conversation, so no prompt would share its
beginning with an earlier one."""
_MODES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def plan_message(service: Service, body: CountTokensRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    edits = body.context_management.edits if body.context_management else None
    if any(edit.get("keep") not in ("all", {"type": "all"}) for edit in edits or ()):
        notify("context_management: the conversation is not shortened here, all of it is read")
    effort = _effort(service, body)
    with renamed_fields(_NAMES):
        return plan_chat(service, as_chat(body, effort), namespace)


def as_chat(body: CountTokensRequest, effort: Effort | None = None) -> ChatRequest:
    """The same request as one for a chat completion."""
    return ChatRequest(
        **body.sampling() | {"stop": body.stop_sequences or None},
        model=body.model,
        messages=[
            *_system(body),
            *(message for turn in _shown(body.messages) for message in _messages(turn)),
        ],
        max_completion_tokens=getattr(body, "max_tokens", None),
        tools=[_tool(tool) for tool in served_tools(body.tools)],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        response_format=_format(body.output_config),
        continue_final_message=body.messages[-1].role == "assistant",
        reasoning_effort=effort,
        reasoning_budget=body.thinking.budget_tokens if body.thinking else None,
    )


def _tool(tool: CustomTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: Choice | None) -> Any:
    if choice is None:
        return None
    if choice.name is not None:
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return _MODES[choice.type]


def _format(config: OutputConfig | None) -> JsonSchemaFormat | None:
    if config is None or config.format is None:
        return None
    return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(schema=config.format.json_schema))


def _effort(service: Service, body: CountTokensRequest) -> Effort | None:
    """How much the model is to think, where its template knows that."""
    outputs: list[TurnOutput | None] = [body.output_config, *(turn.output_config for turn in body.messages)]
    efforts = [output.effort for output in outputs if output and output.effort]
    thinking, wanted = body.thinking, efforts[-1] if efforts else None
    if thinking and thinking.type == "disabled":
        wanted = "none"
    elif thinking and thinking.type == "enabled":
        wanted = wanted or "medium"
    return fitting_effort(service, wanted, "thinking, output_config.effort")


def _shown(turns: Sequence[Turn]) -> Iterator[Turn]:
    """The turns that the model sees: some of the system's end with the next user's."""
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=0)
    for i, turn in enumerate(turns):
        says = turn.content is not None or turn.role == "assistant"
        if says and (turn.clear_at != "next_user_message" or i > last_user):
            yield turn


def _system(body: CountTokensRequest) -> list[Message]:
    said = body.system or ""
    if not isinstance(said, str):
        said = [block for block in said if not block.text.startswith(_FOR_BILLING)]
    return [Message(role="system", content=text_of(said))] if said else []


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn as messages: results of tools in a user's turn become messages of their own."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
    elif turn.role == "assistant":
        yield _assistant(turn)
    else:
        text = ""
        for block in turn.blocks:
            if isinstance(block, TextBlock):
                text += block.text
                continue
            if text:
                yield Message(role=turn.role, content=text)
            text = ""
            if isinstance(block, ToolResultBlock):
                result = f"{'Error: ' if block.is_error else ''}{text_of(block.content)}"
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=result)
        if text or not turn.blocks:
            yield Message(role=turn.role, content=text)


def _assistant(turn: Turn) -> Message:
    said: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in turn.blocks:
        said.setdefault(block.type, []).append(block)
    calls = [ToolCall.of(call.id, call.name, call.input) for call in said["tool_use"]]
    return Message(
        role="assistant",
        content=text_of(said["text"]),
        reasoning_content="".join(block.thinking for block in said["thinking"]) or None,
        tool_calls=calls or None,
    )


# The answer

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageAnswer(PartedAnswer):
    """The answer to one request for a message, in blocks."""

    types: ClassVar = {"content": "text", "reasoning": "thinking", "call": "tool_use"}

    def __init__(self, service: Service, body: MessagesRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._arguments = ""
        """JSON text of the last block, a call"""
        self._head: dict[str, Any] = {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": body.model or service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self._choice.request.prompt), 0, 0),
        }

    def first(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self._head}
        yield {"type": "ping"}

    def _whole(self) -> dict[str, Any]:
        return self._head | self._stop | {"content": self._parts} | self._sums()

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        return anthropic_error(500, body)

    @property
    def _stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        reason, stop = _STOP_REASONS[self._choice.finish_reason], self._choice.completion.stop
        if reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _sums(self) -> dict[str, Any]:
        sums = self.sums()
        usage = sums["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return sums | {"usage": _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])}

    def _open(self, kind: str, piece: Piece) -> Iterator[dict[str, Any]]:
        block: dict[str, Any] = {"type": kind}
        if piece.name:
            block |= {"id": self._choice.calls[piece.call].id, "name": piece.name, "input": {}}
        else:
            block |= {"text": ""} if kind == "text" else {"thinking": "", "signature": ""}
        self._parts.append(block)
        self._is_open, self._arguments = True, ""
        yield self._event("content_block_start", content_block=dict(block))

    def _grow(self, piece: Piece) -> dict[str, Any]:
        block = self._parts[-1]
        delta, name = _DELTAS[block["type"]]
        if block["type"] == "tool_use":
            self._arguments += piece.text
        else:
            block[name] += piece.text
        return self._event("content_block_delta", delta={"type": delta, name: piece.text})

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open, block = False, self._parts[-1]
        if block["type"] == "tool_use":
            block["input"] = parsed_arguments(self._arguments) or {}
        elif block["type"] == "thinking":
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""})
        yield self._event("content_block_stop")

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._stop, **self._sums()}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._parts) - 1, **fields}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """Anthropic counts tokens that were read and tokens whose KV was kept apart."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
