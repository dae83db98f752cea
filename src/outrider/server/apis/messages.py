"""Conversations and tools, as the requests for chats hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from outrider.core.notices import notify
from outrider.server.apis.shapes import (
    CACHED,
    Json,
    Many,
    Shape,
    Text,
    TextPart,
    explained,
    spelled,
    unsupported,
)

ToolName = Annotated[
    str,
    Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$"),
    spelled("1 to 128 characters of A-Z, a-z, 0-9 and _ . : / -"),
]
ToolMode = Literal["none", "auto", "required"]
MAX_TOOLS = 512

_Tool = TypeVar("_Tool", bound=Shape)


class OfFunction(Shape):
    """An object whose type is a function's."""

    type: Annotated[Literal["function"], explained("tools of type {} are not supported. Give functions")]


class Function(Shape):
    """A function that the model may call; `parameters` is a JSON schema of its arguments.

    `strict` true refuses a schema that cannot be enforced whole."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(OfFunction):
    """A tool: a function."""

    ignored: ClassVar = CACHED

    function: Function


class OtherTool(BaseModel):
    """A tool of a kind that is not served here. It is left out, and the answer's notices say so."""

    type: str


def or_other(own: str) -> Discriminator:
    """Tells tools of an API's `own` type, or of none (the tag "own"), from others ("other")."""

    def kind_of(data: Any) -> str:
        kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
        return "other" if isinstance(kind, str) and kind != own else "own"

    return Discriminator(kind_of)


def served_tools(tools: Sequence[_Tool | OtherTool] | None) -> list[_Tool]:
    """The tools without those of other kinds."""
    found: list[_Tool] = []
    for tool in tools or ():
        if isinstance(tool, OtherTool):
            notify(f"tools: {tool.type[:64]} is not a kind of tool that this server has: it was left out")
        else:
            found.append(tool)
    return found


class NamedFunction(Shape):
    """The function that has to be called."""

    name: ToolName


class NamedTool(OfFunction):
    """A tool that has to be called."""

    function: NamedFunction


_Own = Annotated[Tool, Tag("own")]
_Other = Annotated[OtherTool, Tag("other")]
Tools = Annotated[Many[Annotated[_Own | _Other, or_other("function")]], Field(max_length=MAX_TOOLS)]


class CalledFunction(Shape):
    """The function of an earlier call; `arguments` is JSON text, as the model wrote it."""

    # What OpenAI's client for Python adds to an answer that it parsed, and what litellm adds.
    ignored: ClassVar = frozenset({"parsed_arguments", "provider_specific_fields"})

    name: Text
    arguments: str


class ToolCall(Shape):
    """A call that the assistant made in an earlier turn."""

    ignored: ClassVar = frozenset({"provider_specific_fields"})

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @classmethod
    def of(cls, id: str, name: str, arguments: Mapping[str, Any]) -> ToolCall:
        """A call with its arguments as data."""
        text = json.dumps(arguments, ensure_ascii=False)
        return cls(id=id, function=CalledFunction(name=name, arguments=text))


class Message(Shape):
    """One turn. `content` in parts is joined; a `developer` message counts as a system message."""

    refused: ClassVar = {
        "audio": "this server reads text only. Leave audio out",
        "function_call": "function_call is no longer in use. Use tool_calls",
        "annotations": "annotations of earlier answers are not read. Leave them out",
    }
    ignored: ClassVar = CACHED | {"id", "parsed", "provider_specific_fields"}
    renamed: ClassVar = {"reasoning": "reasoning_content"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None

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
        if self.content is None and self.role != "assistant":
            raise unsupported("it is empty. Give it content", "content")
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


def type_of(data: Any) -> str | None:
    """The type of an item or a block; an item without one is a message."""
    if isinstance(data, dict):
        kind = data.get("type", "message")
        return kind if isinstance(kind, str) else None
    return getattr(data, "type", None)


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[_HasText] | None) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
