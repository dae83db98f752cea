"""What an answer may be limited to: OpenAI's response_format, llama.cpp's json_schema and grammar, vLLM's
structured_outputs and its older guided_ fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from outrider.server.shapes.base import Many, Shape, explained

__all__ = [
    "GrammarFields",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "NamedSchema",
    "ResponseFormat",
    "SchemaText",
    "StructuredOutputs",
    "TextFormat",
]

Json = dict[str, Any]
SchemaText = Annotated[str, Field(min_length=1)]
Choices = Annotated[Many[str], Field(min_length=1, max_length=10_000)]

_PATTERN = "White space by a pattern is not supported. Say disable_any_whitespace, or leave it out"


class TextFormat(Shape):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Shape):
    """Any JSON object; with llama.cpp's `schema`, one of that schema."""

    type: Literal["json_object"]
    json_schema: Json | None = Field(None, alias="schema")


class NamedSchema(Shape):
    """A JSON schema. `strict` false goes on without keywords that cannot be enforced and names them in
    the answer's notices; else they are refused."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    json_schema: Json = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Shape):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Shape):
    """vLLM's way to limit an answer; exactly one of them."""

    refused: ClassVar = {
        "structural_tag": "structural tags are not supported. Use tools, or a grammar",
        "whitespace_pattern": _PATTERN,
    }

    json_schema: Json | SchemaText | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="GBNF where it holds `::=`, else llguidance's Lark.")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[
        Literal[False] | None, explained("a schema is taken as it is. Say additionalProperties in it")
    ] = None
    disable_fallback: bool | None = Field(None, description="Has no effect: there is no fallback.")


class GrammarFields(Shape):
    """The fields that limit an answer; at most one of them."""

    response_format: ResponseFormat | None = None
    json_schema: Json | None = Field(None, description="llama.cpp's name for a JSON schema.")
    grammar: str | None = Field(None, description="GBNF where it holds `::=`, else llguidance's Lark.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
