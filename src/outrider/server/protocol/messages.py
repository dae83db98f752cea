"""Conversations and tools as requests hold them: a chat's messages, and the items of a response's input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.server.protocol.base import Many, Shape, explained, unsupported

ToolMode = Literal["none", "auto", "required"]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
Name = Annotated[str, Field(min_length=1)]

_TEXT_ONLY = "this server reads text alone. Leave {} out"
_TEXT_PARTS = explained(_TEXT_ONLY.format("parts of type {}"))
_PARSED = "What OpenAI's client for Python adds to an answer that it parsed: not read."
_PROVIDERS = "What litellm adds to answers: not read."


class _OfFunction(Shape):
    type: Annotated[Literal["function"], explained("tools of type {} are not supported. Give functions")]


class Function(Shape):
    """A function that the model may call; `parameters` is a JSON schema of its arguments.

    `strict` true refuses a schema that cannot be enforced whole."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_OfFunction):
    """A tool: a function."""

    function: Function


class NamedFunction(Shape):
    """The function that has to be called."""

    name: ToolName


class NamedTool(_OfFunction):
    """A tool that has to be called."""

    function: NamedFunction


class FunctionTool(Function, _OfFunction):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""


class NamedFunctionTool(NamedFunction, _OfFunction):
    """The function that has to be called."""


# Messages of chat completions


class TextPart(Shape):
    """A part of a message's content. Images, audio and files are not supported."""

    type: Annotated[Literal["text"], _TEXT_PARTS]
    text: str


class CalledFunction(Shape):
    """The function of an earlier call; `arguments` is JSON text, as the model wrote it."""

    name: Name
    arguments: str
    parsed_arguments: Any = Field(default=None, description=_PARSED)
    provider_specific_fields: Any = Field(default=None, description=_PROVIDERS)


class ToolCall(Shape):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    provider_specific_fields: Any = Field(default=None, description=_PROVIDERS)

    @classmethod
    def of(cls, id: str, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        """A call with its arguments as data."""
        text = json.dumps(arguments, ensure_ascii=False)
        return cls(id=id, function=CalledFunction(name=name, arguments=text))


class Message(Shape):
    """One turn. `content` in parts is joined; a `developer` message counts as a system message."""

    refused: ClassVar = {
        "audio": _TEXT_ONLY.format("audio"),
        "function_call": "function_call is no longer in use. Say tool_calls",
        "annotations": "annotations of earlier answers are not read. Leave them out",
    }

    renamed: ClassVar = {"reasoning": "reasoning_content"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    parsed: Any = Field(default=None, description=_PARSED)
    provider_specific_fields: Any = Field(default=None, description=_PROVIDERS)

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        """Clients send an assistant's message back as they got it, empty lists included."""
        if isinstance(data, dict):
            return {k: v for k, v in data.items() if not (k in ("annotations", "tool_calls") and v == [])}
        return data

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise unsupported("only the assistant calls tools. Give the message the role assistant")
        if self.content is None and not (self.tool_calls or self.refusal or self.reasoning_content):
            raise unsupported("it says nothing. Give it content", "content")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as templates read it, with its content as one text."""
        kept = {"role", "name", "reasoning_content", "tool_call_id"}
        plain = self.model_dump(include=kept, exclude_none=True)
        plain["content"] = text_of(self.content) or self.refusal or ""
        calls = [
            {
                "id": call.id or f"call_{i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for i, call in enumerate(self.tool_calls or ())
        ]
        return plain | {"tool_calls": calls} if calls else plain


class Prediction(Shape):
    """What much of the answer will be like: a source of drafts."""

    type: Literal["content"]
    content: str | Many[TextPart]


# Items of responses


class Part(Shape):
    """A part of a message: text. Images, audio and files are not supported."""

    type: Annotated[Literal["input_text", "output_text"], _TEXT_PARTS]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(Shape):
    """What earlier answers say of an item besides: accepted, without effect."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """Something said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(_Item):
    """A call that the assistant made."""

    refused: ClassVar = {"namespace": "tools have no namespaces here. Leave it out"}

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionOutputItem(_Item):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[Part]


class ReasoningText(Shape):
    """What the assistant thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """What the assistant thought before its answer. A summary alone is not read."""

    refused: ClassVar = {
        "encrypted_content": "nothing is encrypted here. Give content, or leave the item out"
    }

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: Many[ReasoningText] | None = None


def type_of(data: Any) -> str | None:
    """What kind of item or block it is."""
    if isinstance(data, dict):
        kind = data.get("type", "message")
        return kind if isinstance(kind, str) else None
    return getattr(data, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        type_of,
        custom_error_type="unsupported",
        custom_error_message="messages, function calls, their outputs and reasoning are read. Leave others",
    ),
]


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[_HasText] | None) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
