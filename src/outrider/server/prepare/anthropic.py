"""A request for a message as a chat request: blocks become messages, and the rest is one way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from outrider.server.errors import Problem
from outrider.server.prepare.chat import fitting_effort, plan_chat
from outrider.server.prepare.plan import GenerationPlan
from outrider.server.protocol.anthropic import (
    Choice,
    CountTokensRequest,
    CustomTool,
    OutputConfig,
    TextBlock,
    ToolResultBlock,
    Turn,
    TurnOutput,
)
from outrider.server.protocol.base import JsonSchemaFormat, NamedSchema, SamplingFields
from outrider.server.protocol.messages import (
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    text_of,
)
from outrider.server.protocol.requests import ChatRequest, Effort
from outrider.server.service import Service

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
"""What Claude Code puts first into the system prompt, for its own service: another text in each conversation,
with which no beginning of a prompt would be found again."""
_MODES: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def plan_message(service: Service, body: CountTokensRequest, namespace: str) -> GenerationPlan:
    """The request that is asked for. Raises Problem, in terms of this endpoint's fields."""
    effort, notices = _effort(service, body)
    try:
        plan = plan_chat(service, as_chat(body, effort), namespace)
    except Problem as error:
        raise error.renamed(_NAMES) from None
    return replace(plan, notices=(*plan.notices, *notices, *_not_shortened(body)))


def as_chat(body: CountTokensRequest, effort: Effort | None = None) -> ChatRequest:
    """The same request as one for a chat completion."""
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return ChatRequest(
        **shared | {"stop": body.stop_sequences or None},
        model=body.model,
        messages=[
            *_system(body),
            *(message for turn in _shown(body.messages) for message in _messages(turn)),
        ],
        max_completion_tokens=getattr(body, "max_tokens", None),
        tools=[_tool(tool) for tool in body.tools or ()],
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


def _effort(service: Service, body: CountTokensRequest) -> tuple[Effort | None, list[str]]:
    """How much the model is to think, where its template knows that, and what is not done of it."""
    outputs: list[TurnOutput | None] = [body.output_config, *(turn.output_config for turn in body.messages)]
    efforts = [output.effort for output in outputs if output and output.effort]
    thinking, wanted = body.thinking, efforts[-1] if efforts else None
    if thinking and thinking.type == "disabled":
        wanted = "none"
    elif thinking and thinking.type == "enabled":
        wanted = wanted or "medium"
    return fitting_effort(service, wanted, "thinking, output_config.effort")


def _not_shortened(body: CountTokensRequest) -> list[str]:
    """A notice where parts of the conversation were to be left out."""
    edits = body.context_management.edits if body.context_management else None
    asked = [edit for edit in edits or () if edit.get("keep") not in ("all", {"type": "all"})]
    return ["context_management: the conversation is not shortened here, all of it is read"] if asked else []


def _shown(turns: Sequence[Turn]) -> Iterator[Turn]:
    """The turns that the model sees: a system's may end with the next user's."""
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=0)
    for i, turn in enumerate(turns):
        if turn.content is not None and (turn.clear_at != "next_user_message" or i > last_user):
            yield turn


def _system(body: CountTokensRequest) -> list[Message]:
    said = body.system or ""
    if not isinstance(said, str):
        said = [block for block in said if not block.text.startswith(_FOR_BILLING)]
    return [Message(role="system", content=text_of(said))] if said else []


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn's messages: a user's holds what tools returned, which are messages of their own."""
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
