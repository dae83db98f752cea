"""A conversation as chat requests hold it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.server.shapes.base import Many, Shape, unsupported

__all__ = ["CalledFunction", "Message", "Prediction", "TextPart", "ToolCall", "text_of"]

_TEXT_ONLY = "this server reads text alone. Leave {} out"
_PARSED = "What OpenAI's client for Python adds to an answer that it parsed: not read."
_PROVIDERS = "What litellm adds to answers: not read."


class TextPart(Shape):
    """A part of a message's content. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(_TEXT_ONLY.format(f"parts of type {kind[:40]}"), "type")
        return data


class CalledFunction(Shape):
    """The function of an earlier call; `arguments` is JSON text, as the model wrote it."""

    name: Annotated[str, Field(min_length=1)]
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


class Message(Shape):
    """One turn. `content` in parts is joined; a `developer` message counts as a system message."""

    refused: ClassVar = {
        "audio": _TEXT_ONLY.format("audio"),
        "function_call": "function_call is no longer in use. Say tool_calls",
        "annotations": "annotations of earlier answers are not read. Leave them out",
    }

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
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        plain["content"] = text_of(self.content) or self.refusal or ""
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                plain[name] = value
        if self.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for i, call in enumerate(self.tool_calls)
            ]
        return plain


class Prediction(Shape):
    """What much of the answer will be like: a source of drafts."""

    type: Literal["content"]
    content: str | Many[TextPart]


def text_of(content: str | list[TextPart] | None) -> str:
    """Content as one text."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
