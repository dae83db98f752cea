"""Tools that a chat may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from outrider.server.shapes.base import Shape, unsupported

__all__ = ["Function", "NamedFunction", "NamedTool", "Tool", "ToolMode", "ToolName", "refuse_type"]

ToolMode = Literal["none", "auto", "required"]

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def refuse_type(data: Any) -> Any:
    """Refuse tools that are no functions, by their type."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"tools of type {kind[:40]} are not supported. Give functions", "type")
    return data


class Function(Shape):
    """A function that the model may call; `parameters` is a JSON schema of its arguments.

    `strict` true refuses a schema that cannot be enforced whole."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    """A tool: a function."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        return refuse_type(data)


class NamedFunction(Shape):
    """The function that has to be called."""

    name: ToolName


class NamedTool(Shape):
    """A tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        return refuse_type(data)
