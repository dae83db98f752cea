"""What POST /v1/responses reads: the items of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.server.shapes.base import Many, Shape, unsupported

__all__ = ["FunctionCallItem", "FunctionOutputItem", "Item", "MessageItem", "Part", "ReasoningItem", "joined"]

Status = Literal["in_progress", "completed", "incomplete"]
Kind = Literal["input_text", "output_text"]


class Part(Shape):
    """A part of a message: text. Images, audio and files are not supported."""

    type: Kind
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text"):
            raise unsupported(f"this server reads text alone. Leave parts of type {kind[:40]} out", "type")
        return data


class _Item(Shape):
    """What earlier answers say of an item besides: accepted, without effect."""

    id: str | None = None
    status: Status | None = None


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
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class FunctionOutputItem(_Item):
    """What a call gave."""

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


def _kind(data: Any) -> str | None:
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
        _kind,
        custom_error_type="unsupported",
        custom_error_message="messages, function calls, their outputs and reasoning are read. Leave others",
    ),
]


def joined(content: str | Many[Part]) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
