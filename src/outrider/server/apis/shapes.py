"""What the requests of all APIs have in common: fields, conversations, tools. Unknown fields are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.core.notices import notify
from outrider.core.params import DraftSampling, FastForward, Rule, SamplingParams
from outrider.server.errors import invalid_body

_MAX_LEVELS = 250
_MAX_UNKNOWN = 16
_NO_EFFECT = frozenset(
    {
        # Beginnings of prompts are kept by themselves, models stay loaded, no answer is stored, nothing is
        # cut out of a conversation, and a prompt is read whole.
        *("cache_control", "n_cache_reuse", "prompt_cache_key", "prompt_cache_options", "clear_at"),
        *("prompt_cache_retention", "keep_alive", "store", "context_management", "truncation", "truncate"),
        *("shift", "n_keep", "num_keep", "n_discard", "t_max_prompt_ms"),
        # There is one tier, X-Request-Id names a request, keys take turns, and the server chooses a slot.
        *("service_tier", "request_id", "priority", "id_slot", "slot_id", "inference_geo", "user"),
        *("metadata", "safety_identifier"),
        # `outrider` has the timings, and the last chunk the usage.
        *("timings_per_token", "return_progress", "include_obfuscation", "continuous_usage_stats"),
        "sse_ping_interval",
        # Reasoning is given as it is, and how much is said is not enforced.
        *("summary", "generate_summary", "display", "signature", "verbosity", "n_indent", "max_tool_calls"),
        # Filters keep a token at least, and these samplers are off.
        *("min_keep", "mirostat_tau", "mirostat_eta", "tfs_z", "penalize_newline"),
        # How a model is run is said when the server is started.
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "numa", "use_mmap"),
        *("use_mlock", "vocab_only", "logits_all", "embedding_only", "draft_num_predict", "verbose"),
        # vllm-router writes these into every body, with what holds here anyway.
        *("no_stop_trim", "skip_special_tokens", "return_hidden_states", "separate_reasoning"),
        *("stream_reasoning", "include_reasoning", "add_generation_prompt", "disable_fallback"),
        # What clients add to messages and tools, and send back.
        *("id", "index", "status", "annotations", "citations", "caller", "parsed", "parsed_arguments"),
        *("provider_specific_fields", "eager_input_streaming", "input_examples", "defer_loading"),
        *("description", "time"),
    }
)
"""Fields that any object may have, unless it has them itself."""

_Part = TypeVar("_Part")

Many = Annotated[list[_Part], Field(fail_fast=True)]
"""A list whose reading ends at the first wrong part: a body may hold millions of them, and an error for each
would take gigabytes."""


def unsupported(why: str, field: str | None = None) -> PydanticCustomError:
    """An error about a known field or value that is not supported; `why` includes the way out."""
    return PydanticCustomError("unsupported", "{why}", {"why": why, "field": field})


class Shape(BaseModel):
    """A JSON object of a request. Null is as if a field were not there. `renamed` are other servers' names of
    fields; those of all its bases count."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_effectless(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        named = {key: value for key, value in data.items() if value is not None}
        for base in cls.__mro__:
            for other, own in vars(base).get("renamed", {}).items():
                if (value := named.pop(other, None)) is not None and named.setdefault(own, value) != value:
                    raise unsupported(f"it is not the same as {own}. Leave one of them out", other)
        unknown = [key for key in named if key not in known]
        dropped = _NO_EFFECT - known | set(unknown[_MAX_UNKNOWN:])  # to name a few of a million is enough
        return {key: value for key, value in named.items() if key not in dropped}


def variants(base: type[Shape], read: str, **kinds: Mapping[str, Any]) -> Any:
    """Objects of several types, each with its fields, which may be left out where they may be None. `read`
    says which types are read, in the error about another."""
    found: list[Any] = []
    for kind, fields_of in kinds.items():
        definitions: dict[str, Any] = {
            name: (of, None if type(None) in getattr(of, "__args__", ()) else ...)
            for name, of in fields_of.items()
        }
        definitions["type"] = Literal[kind], kind
        model = create_model(f"{base.__name__.strip('_')}_{kind}", __base__=base, **definitions)
        found.append(Annotated[model, Tag(kind)])
    chooses = Discriminator(
        _type_of, custom_error_type="unsupported", custom_error_message=f"{read} are read. Leave others out"
    )
    return Annotated[Union[tuple(found)], chooses]  # noqa: UP007


def _type_of(data: Any, default: str | None = "message") -> str | None:
    """The type of an item, a block or a tool; an item without one is a message."""
    kind = data.get("type", default) if isinstance(data, dict) else getattr(data, "type", None)
    return kind if isinstance(kind, str) else None


class Body(Shape):
    """A whole request: valid Unicode, and nested no deeper than anything that reads it can follow."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        level = [data]
        for _ in range(_MAX_LEVELS + 1):
            if not level:
                return data
            try:
                "".join(value for value in level if isinstance(value, str)).encode()
            except UnicodeEncodeError:
                raise unsupported("half of a surrogate pair is in it. Give valid Unicode") from None
            parts = [[*value, *value.values()] if isinstance(value, dict) else value for value in level]
            level = [part for values in parts if isinstance(values, list) for part in values]
        raise unsupported(f"it is nested deeper than {_MAX_LEVELS} levels. Simplify it")


WHOLE = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)
"""For integers that JSON writes with a fraction, as in 1.0."""
MAX_INT = 2**31 - 1

Json = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, le=MAX_INT)]
Tokens = Annotated[Many[Token], Field(min_length=1)]
Prompts = (
    Text | Tokens | Annotated[Many[Text], Field(min_length=1)] | Annotated[Many[Tokens], Field(min_length=1)]
)
"""a text, tokens, or a list of either"""
NumTokensOrOff = Annotated[int, Field(ge=-1, le=MAX_INT), WHOLE]
MaxTokens = Annotated[Literal[-1] | Annotated[int, Field(ge=1, le=MAX_INT)], WHOLE]
"""of an answer; -1: no limit but the server's"""
NumChoices = Annotated[int, Field(ge=1, le=128), WHOLE]
NumLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]
StopTexts = Annotated[Many[StopText], Field(max_length=32)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# How the next token is chosen: made of the fields and ranges of SamplingParams

_LEAST = {"repeat_penalty": 0.01, "dynatemp_exponent": 0.0}
"""Least values that keep logits from becoming too large."""
_LARGEST = 100.0
"""The largest value where the engine has no limit."""


def _sampled() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in fields(SamplingParams):
        if not parameter.metadata:
            continue
        kind, largest = (int, MAX_INT) if isinstance(parameter.default, int) else (float, _LARGEST)
        bounds = {"le": largest} | parameter.metadata["bounds"]
        if parameter.name in _LEAST:
            bounds = {"le": largest, "ge": _LEAST[parameter.name]}
        elif "gt" not in bounds:
            bounds = {"ge": -largest} | bounds
        checks = (WHOLE,) if kind is int else ()
        found[parameter.name] = Annotated[kind, Field(**bounds), *checks] | None, None
    return found


if TYPE_CHECKING:
    _Sampled = Shape
else:
    _Sampled = create_model("_Sampled", __base__=Shape, **_sampled())

_MAX_BIASES = 4_096


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > _MAX_BIASES:
        raise unsupported(f"it has more than {_MAX_BIASES} tokens. Leave some out")
    return biases


class Speculation(Shape):
    """How to draft for this request; what is absent is as the server has it."""

    policy: Literal["auto", "lookup", "model", "fixed", "plain"] | None = None
    max_draft: Annotated[int, Field(ge=0, le=64), WHOLE] | None = None
    fast_forward: FastForward | None = None
    rule: Rule | None = None
    draft_sampling: DraftSampling | None = None
    show_sources: bool | None = None
    """tell, with every piece of the text, who drafted it"""


class SamplingFields(_Sampled):
    """How an answer is generated: OpenAI's fields, and llama.cpp's samplers under its names."""

    renamed: ClassVar = {"repetition_penalty": "repeat_penalty"}

    mirostat: Annotated[Literal[0], WHOLE] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE] | None = None
    """-1 draws a fresh one; the n-th of several answers has seed + n"""
    stop: StopText | StopTexts | None = None
    dry_sequence_breakers: Annotated[Many[StopText], Field(max_length=64)] | None = None
    samplers: Annotated[Many[Annotated[str, Field(max_length=64)]], Field(max_length=32)] | None = None
    """those that are not named are off; notices name another order, and what is not known here"""
    logit_bias: Annotated[
        dict[
            Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
        ]
        | None,
        BeforeValidator(_few),
    ] = None
    """by token id; -100 bars a token"""
    ignore_eos: bool | None = None
    bitwise: bool | None = None
    """the text of plain decoding bit for bit, or an error"""
    speculation: Speculation | None = None
    cache_prompt: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The given ones of these fields, for a request of another API."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def fast_forward(self) -> FastForward:
        """What becomes of text that a grammar forces."""
        return (self.speculation and self.speculation.fast_forward) or "exact"


# What an answer may be limited to: OpenAI's response_format, llama.cpp's json_schema and grammar, vLLM's
# structured_outputs. A grammar is GBNF where it holds `::=`, else Lark.


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


class StructuredOutputs(Shape):
    """vLLM's way to limit an answer; at most one of them."""

    json_schema: Json | Text | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[Many[str], Field(min_length=1, max_length=10_000)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


# What all requests for text share


class StreamOptions(Shape):
    """What a stream tells besides the text."""

    include_usage: bool | None = None


class GenerationRequest(SamplingFields, Body):
    """What the endpoints for text share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextPart(Shape):
    """A part of a message's content. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str


def text_of(content: Any) -> str:
    """Content, a text or parts that have one, as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(Shape):
    """A text that the answer will resemble: a source of drafts."""

    type: Literal["content"]
    content: str | Many[TextPart]


class TextRequest(GenerationRequest):
    """What chats and completions share: how many choices, and at most one field that limits the answer."""

    n: NumChoices | None = None
    prediction: Prediction | None = None
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    json_schema: Json | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """A request of another API, as the fields of this one in plain data. Raises Problem."""
        try:
            return cls(**fields)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise invalid_body(found, fields) from None


class ReasoningFields(Shape):
    """How much the model is to think: tokens of reasoning, after which its end is forced. -1: no limit."""

    renamed: ClassVar = dict.fromkeys(
        ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget", "thinking_budget"),
        "reasoning_budget",
    )

    reasoning_budget: NumTokensOrOff | None = None


# Tools

ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.:/-]{1,128}$")]
ToolMode = Literal["none", "auto", "required"]

_Tool = TypeVar("_Tool", bound=Shape)


class Function(Shape):
    """A function that the model may call; `parameters` is a JSON schema of its arguments.

    `strict` true refuses a schema that cannot be enforced whole."""

    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Shape):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class OtherTool(BaseModel):
    """A tool of a kind that is not served here. It is left out, and the answer's notices say so."""

    type: str


Other = Annotated[OtherTool, Tag("other")]
ToolsOf = Annotated[Many[_Part], Field(max_length=512)]


def own_or_other(own: str) -> Discriminator:
    """Tells tools of an API's `own` type, or of none (the tag "own"), from others ("other")."""
    return Discriminator(lambda data: "own" if _type_of(data, own) in (own, None) else "other")


Tools = ToolsOf[Annotated[Annotated[Tool, Tag("own")] | Other, own_or_other("function")]]


def served_tools(tools: Sequence[_Tool | OtherTool] | None) -> list[_Tool]:
    """The tools without those of other kinds."""
    found: list[_Tool] = []
    for tool in tools or ():
        if isinstance(tool, OtherTool):
            notify(f"tools: {tool.type[:64]} is not a kind of tool that this server has: it was left out")
        else:
            found.append(tool)
    return found


def function_tool(**fields: Any) -> Json:
    """A function as a chat request lists it or names it."""
    return {"type": "function", "function": fields}


def json_schema_format(schema: Json, **fields: Any) -> Json:
    """A schema as the `response_format` of a chat request."""
    return {"type": "json_schema", "json_schema": {"schema": schema, **fields}}


# Conversations


NoImages = Annotated[list[Any], Field(max_length=0)] | None


class CalledFunction(Shape):
    """The function of an earlier call; `arguments` is JSON text, as the model wrote it, or an object."""

    name: Text
    arguments: str | Json = "{}"


class ToolCall(Shape):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


def tool_call(id: str, name: str, arguments: str | Mapping[str, Any]) -> Json:
    """A call as an assistant's message has it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


class Message(Shape):
    """One turn, as OpenAI and Ollama have it. `content` in parts is joined; a `developer` message counts as a
    system message."""

    renamed: ClassVar = {
        "reasoning": "reasoning_content",
        "thinking": "reasoning_content",
        "tool_name": "name",
    }

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: str | Many[TextPart] | None = None
    images: NoImages = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise unsupported("only the assistant calls tools. Give the message the role assistant")
        says_something(self.role, self.content)
        return self

    def plain(self) -> Json:
        """The message as templates read it, with its content as one text."""
        kept = {"role", "name", "reasoning_content", "tool_call_id"}
        plain = self.model_dump(include=kept, exclude_none=True)
        plain["content"] = text_of(self.content) or self.refusal or ""
        calls = [
            tool_call(call.id or f"call_{i}", call.function.name, call.function.arguments)
            for i, call in enumerate(self.tool_calls or ())
        ]
        return plain | {"tool_calls": calls} if calls else plain


def says_something(role: str, content: object) -> None:
    """Raises for a turn without content that is not the assistant's."""
    if content is None and role != "assistant":
        raise unsupported("it is empty. Give it content", "content")
