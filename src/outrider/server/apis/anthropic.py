"""Anthropic's messages: a conversation in blocks, which becomes a request for a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Tag, model_validator
from starlette.responses import Response

from outrider.core.data import Kind, Piece
from outrider.server.apis import shapes
from outrider.server.apis.answers import AnswerPart, PartedAnswer, answer, parsed_arguments
from outrider.server.apis.chat import ChatRequest, fitting_effort, plan_chat
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import Json, Many, Shape, TextPart, text_of, unsupported
from outrider.server.errors import renamed_fields
from outrider.server.models import models_of
from outrider.server.service import Service

router = APIRouter(tags=["text"])


if TYPE_CHECKING:
    Block = Any
else:
    # A signature is not checked; redacted thoughts, which only another server can read, are left out. What an
    # error returned is given to the model as an error's text.
    Block = shapes.variants(
        Shape,
        "text, thinking, tool_use and tool_result",
        text={"text": str},
        thinking={"thinking": str},
        redacted_thinking={"data": str},
        tool_use={"id": str, "name": shapes.Text, "input": Json},
        tool_result={
            "tool_use_id": str,
            "content": str | Many[TextPart] | None,
            "is_error": bool | None,
        },
    )

_BLOCKS = {
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}
"""The blocks that a turn of each role may have."""


class OutputSchema(Shape):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(Shape):
    """What the answer has to be, and how much the model is to think."""

    effort: shapes.Effort | None = None
    format: OutputSchema | None = None


class Turn(Shape):
    """One turn of the conversation. The effort of its `output_config` is for the answers after it."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block] | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Turn:
        for block in self.blocks:
            if block.type not in _BLOCKS[self.role]:
                raise unsupported(f"{block.type} is not a block of the role {self.role}. Leave it out")
        if self.role != "system":
            shapes.says_something(self.role, self.content)
        return self

    @property
    def blocks(self) -> Sequence[Block]:
        """Its content, where that is in blocks."""
        return self.content if self.content and not isinstance(self.content, str) else ()


class CustomTool(Shape):
    """A tool that the model may call; `input_schema` is a JSON schema of its arguments."""

    type: Literal["custom"] | None = None
    name: shapes.ToolName
    description: str | None = None
    input_schema: Json
    strict: bool | None = None


class Choice(Shape):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Shape):
    """Whether the model thinks before it answers, where its template knows that. Thoughts are given as they
    are; after `budget_tokens` their end is forced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class CountTokensRequest(shapes.GenerationRequest):
    """A conversation whose tokens are to be counted: a request for a message without `max_tokens`."""

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextPart] | None = None
    tools: (
        shapes.ToolsOf[
            Annotated[Annotated[CustomTool, Tag("own")] | shapes.Other, shapes.own_or_other("custom")]
        ]
        | None
    ) = None
    tool_choice: Choice | None = None
    stop_sequences: shapes.StopTexts | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to be continued."""

    max_tokens: shapes.MaxTokens


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Continue a conversation, as Anthropic's API; with `stream`, as typed events."""
    return await answer(request, body, plan_message, MessageAnswer)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Any:
    """The tokens of a conversation, as Anthropic's API."""
    async with models_of(request).serving(body.model) as service:
        plan, _ = await service.prepared(lambda: plan_message(service, body, ""))
        return {"input_tokens": len(plan.requests[0].prompt)}


# The plan

_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "reasoning_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
}
"""What the fields of a chat request are called here."""
_FOR_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins the system prompt with it. It differs in each conversation, so no prompt would share its
beginning with an earlier one."""
_MODES = {"auto": "auto", "any": "required", "none": "none"}


@renamed_fields(_NAMES)
def plan_message(service: Service, body: CountTokensRequest, namespace: str) -> GenerationPlan:
    """The engine request. Raises Problem, in terms of this API's fields."""
    return plan_chat(service, _as_chat(service, body), namespace)


def _as_chat(service: Service, body: CountTokensRequest) -> ChatRequest:
    choice, form = body.tool_choice, body.output_config.format if body.output_config else None
    tools = [
        shapes.function_tool(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        for tool in shapes.served_tools(body.tools)
    ]
    mode: Any = None
    if choice is not None:
        mode = shapes.function_tool(name=choice.name) if choice.type == "tool" else _MODES[choice.type]
    return ChatRequest.of(
        **body.sampling() | ({"stop": body.stop_sequences} if body.stop_sequences else {}),
        model=body.model,
        messages=[*_system(body), *(message for turn in body.messages for message in _messages(turn))],
        max_tokens=getattr(body, "max_tokens", None),
        tools=tools,
        tool_choice=mode,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=form and shapes.json_schema_format(form.json_schema),
        continue_final_message=body.messages[-1].role == "assistant",
        reasoning_effort=_effort(service, body),
        reasoning_budget=body.thinking.budget_tokens if body.thinking else None,
    )


def _effort(service: Service, body: CountTokensRequest) -> shapes.Effort | None:
    outputs = [body.output_config, *(turn.output_config for turn in body.messages)]
    efforts = [output.effort for output in outputs if output and output.effort]
    thinking, wanted = body.thinking, efforts[-1] if efforts else None
    if thinking and thinking.type == "disabled":
        wanted = "none"
    elif thinking and thinking.type == "enabled":
        wanted = wanted or "medium"
    return fitting_effort(service, wanted, "thinking, output_config.effort")


def _system(body: CountTokensRequest) -> list[Json]:
    said = body.system or ""
    if not isinstance(said, str):
        said = [block for block in said if not block.text.startswith(_FOR_BILLING)]
    return [{"role": "system", "content": text_of(said)}] if said else []


def _messages(turn: Turn) -> Iterator[Json]:
    """A turn as messages: results of tools in a user's turn become messages of their own. A system turn that
    says nothing is left out."""
    if turn.content is None and turn.role == "system":
        return
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _assistant(turn)
    else:
        text = ""
        for block in turn.blocks:
            if block.type == "text":
                text += block.text
                continue
            if text:
                yield {"role": turn.role, "content": text}
            text = ""
            result = f"{'Error: ' if block.is_error else ''}{text_of(block.content)}"
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        if text or not turn.blocks:
            yield {"role": turn.role, "content": text}


def _assistant(turn: Turn) -> Json:
    def said(kind: str) -> list[Any]:
        return [block for block in turn.blocks if block.type == kind]

    calls = [shapes.tool_call(call.id, call.name, call.input) for call in said("tool_use")]
    return {
        "role": "assistant",
        "content": text_of(said("text")),
        "reasoning_content": "".join(block.thinking for block in said("thinking")) or None,
        "tool_calls": calls,
    }


# The answer

_BLOCK_TYPES: dict[Kind, tuple[str, str, str]] = {
    "content": ("text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}
"""Of blocks and of their deltas, and the fields of the deltas' text."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageAnswer(PartedAnswer):
    """The answer to one request for a message, in blocks."""

    def __init__(self, service: Service, body: MessagesRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        self._head: Json = {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": body.model or service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(self._choice.request.prompt), 0, 0),
        }

    def first(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self._head}
        yield {"type": "ping"}

    def _whole(self) -> Json:
        return self._head | self._stop | {"content": [_block(part) for part in self._parts]} | self._sums()

    @property
    def _stop(self) -> Json:
        reason, stop = _STOP_REASONS[self._choice.finish_reason], self._choice.completion.stop
        if reason == "end_turn" and stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _sums(self) -> Json:
        sums = self.sums()
        usage = sums["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return sums | {"usage": _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])}

    def _opened(self, part: AnswerPart) -> Iterator[Json]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    def _grown(self, part: AnswerPart, piece: Piece) -> Json:
        _, kind, name = _BLOCK_TYPES[part.kind]
        return _delta(part, {"type": kind, name: piece.text})

    def _closed(self, part: AnswerPart) -> Iterator[Json]:
        if part.kind == "reasoning":
            yield _delta(part, {"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": part.index}

    def _end(self) -> Iterator[Json]:
        yield {"type": "message_delta", "delta": self._stop, **self._sums()}
        yield {"type": "message_stop"}


def _delta(part: AnswerPart, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: AnswerPart) -> Json:
    if part.call is not None:
        arguments = parsed_arguments(part.text) or {}
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": arguments}
    kind = _BLOCK_TYPES[part.kind][0]
    return {"type": kind, kind: part.text} | ({"signature": ""} if kind == "thinking" else {})


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
