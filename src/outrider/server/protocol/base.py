"""What all models of requests have in common: unknown fields are named, and so are known ones that are not
supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.core.params import DraftSampling, FastForward, Rule

_MAX_LEVELS = 250
_MAX_UNKNOWN = 16

_Part = TypeVar("_Part")

Many = Annotated[list[_Part], Field(fail_fast=True)]
"""A list in which the first part that is wrong ends the reading: a body may hold millions of them, and an
error for each would take gigabytes."""


def unsupported(why: str, field: str | None = None) -> PydanticCustomError:
    """An error about something that is known but not supported: `why` with the way out."""
    return PydanticCustomError("unsupported", "{why}", {"why": why, "field": field})


class Shape(BaseModel):
    """A JSON object of a request. `refused` are fields that other servers know and this one does not
    support, with the reason and the way out; null is as if they were not there. `renamed` are other
    servers' names of fields; -1 in them is null."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for field, why in cls.refused.items():
            if data.get(field) is not None:
                raise unsupported(why, field)
        data = _with_own_names(data, cls.renamed)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [key for key in data if key not in known and key not in cls.refused]
        dropped = {*cls.refused, *unknown[_MAX_UNKNOWN:]}  # to name a few of a million is enough
        return {key: value for key, value in data.items() if key not in dropped}


def _with_own_names(data: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    named = {key: value for key, value in data.items() if key not in renamed}
    for other, own in renamed.items():
        value = data.get(other)
        if value is None or value == -1:
            continue
        if named.get(own) is None:
            named[own] = value
        elif named[own] != value:
            raise unsupported(f"it is not the same as {own}. Leave one of them out", other)
    return named


class Body(Shape):
    """A whole request: valid Unicode, and nested no deeper than anything that reads it can follow."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        level = [data]
        for _ in range(_MAX_LEVELS):
            level = [value for value in level if isinstance(value, dict | list | str)]
            if not all(_is_unicode(value) for value in level if isinstance(value, str)):
                raise unsupported("half of a surrogate pair is in it. Give valid Unicode")
            parts = [[*value, *value.values()] if isinstance(value, dict) else value for value in level]
            level = [part for values in parts if isinstance(values, list) for part in values]
            if not level:
                return data
        raise unsupported(f"it is nested deeper than {_MAX_LEVELS} levels. Simplify it")


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def explained(why: str) -> WrapValidator:
    """Says `why` a value other than those of the type is not supported; numbers never are. With {} in it for
    the value it speaks of texts alone."""

    def check(value: Any, handler: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # 0 is equal to false
        if "{}" in why and not isinstance(value, str):
            return handler(value)
        with suppress(ValidationError):
            if not is_number:
                return handler(value)
        raise unsupported(why.format(str(value)[:40]))

    return WrapValidator(check)


def only(neutral: float, why: str) -> AfterValidator:
    """Says `why` a number other than the `neutral` one is not supported."""

    def check(value: Any) -> Any:
        if value != neutral:
            raise unsupported(f"{why}. Say {neutral:g}, or leave it out")
        return value

    return AfterValidator(check)


def few(most: int) -> BeforeValidator:
    """Refuses an object of too many fields before it looks at any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", "", {"max_length": most})
        return value

    return BeforeValidator(check)


WHOLE = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)
"""For integers, which JSON may write with a fraction of zero."""


# The fields that the endpoints of text share: sampling, speculation, what limits an answer, and what
# clients send that has no meaning here.

PolicyName = Literal["auto", "lookup", "model", "fixed", "plain"]
Json = dict[str, Any]

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1)]
UpTo100 = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Factor = Annotated[float, Field(ge=0.01, le=100)]
NumTokens = Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE]
NumTokensOrOff = Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE]
MaxTokens = Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]
NumChoices = Annotated[int, Field(ge=1, le=128), WHOLE]
NumLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
StopText = Annotated[str, Field(min_length=1, max_length=1_000)]
SchemaText = Annotated[str, Field(min_length=1)]
SchemaName = Annotated[str, Field(max_length=256)]
SamplerName = Annotated[str, Field(max_length=64)]
AllowedTexts = Annotated[Many[str], Field(min_length=1, max_length=10_000)]

_DIALECTS = "GBNF where it holds `::=`, else llguidance's Lark."
_MAX_BIASES = 4_096
_MIROSTAT = "Accepted, without effect: there is no mirostat."


def _biases(value: Any) -> Any:
    """llama.cpp's pairs of a token and its bias as an object; false bars a token."""
    if not isinstance(value, list) or len(value) > _MAX_BIASES or not all(map(_is_pair, value)):
        return value
    return {str(token): -100 if bias is False else bias for token, bias in value}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], int | str)


class Speculation(Shape):
    """How this request is to be drafted for; what is absent stays as the server has it.

    None of these changes what the answer is drawn from, but `lenience` below 1: it accepts other tokens
    than plain decoding would, and the answer says so.
    """

    policy: PolicyName | None = Field(None, description="Who drafts; `plain`: nobody.")
    max_draft: Annotated[int, Field(ge=0, le=64), WHOLE] | None = Field(
        None, description="The most tokens that are drafted in one step."
    )
    fast_forward: FastForward | None = Field(None, description="What becomes of text that a grammar forces.")
    rule: Rule | None = Field(None, description="Which drafted tokens are kept.")
    draft_sampling: DraftSampling | None = None
    lenience: Positive | None = Field(
        None, description="Below 1: accept tokens up to 1 / lenience times as likely as the model has them."
    )
    show_sources: bool | None = Field(None, description="Tell, with every piece of the text, who drafted it.")


class StreamOptions(Shape):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Has no effect: nothing is obfuscated.")


class CommonSampling(Shape):
    """How the next token is chosen, in the names that OpenAI, llama.cpp and Ollama share."""

    temperature: UpTo100 | None = None
    top_p: Probability | None = None
    top_k: NumTokensOrOff | None = Field(None, description="0 or -1: off.")
    min_p: Probability | None = None
    typical_p: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Factor | None = None
    repeat_last_n: NumTokensOrOff | None = None
    mirostat: Annotated[int, only(0, "mirostat is not supported")] | None = None
    mirostat_tau: Any = Field(None, description=_MIROSTAT)
    mirostat_eta: Any = Field(None, description=_MIROSTAT)
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE] | None = Field(
        None, description="-1 draws a fresh one; the n-th of several answers has seed + n."
    )
    stop: StopText | Annotated[Many[StopText], Field(max_length=32)] | None = None


class SamplingFields(CommonSampling):
    """How the next token is chosen: OpenAI's fields, and llama.cpp's samplers under its names."""

    top_n_sigma: Annotated[float, Field(ge=-1, le=1_000)] | None = Field(None, description="0 or less: off.")
    dynatemp_range: UpTo100 | None = None
    dynatemp_exponent: UpTo100 | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    repetition_penalty: Factor | None = Field(None, description="vLLM's name of repeat_penalty.")
    dry_multiplier: UpTo100 | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: NumTokens | None = None
    dry_penalty_last_n: NumTokensOrOff | None = None
    dry_sequence_breakers: Annotated[Many[StopText], Field(max_length=64)] | None = None
    samplers: Annotated[Many[SamplerName], Field(max_length=32)] | None = Field(
        None,
        description="Those that are not named are off. Their order is fixed (docs/sampling.md): the notices "
        "name another, and samplers that are not known here.",
    )
    logit_bias: Annotated[
        dict[TokenId, Penalty] | None,
        Field(max_length=_MAX_BIASES),
        few(_MAX_BIASES),
        BeforeValidator(_biases),
    ] = Field(None, description="By token id; -100 bars a token. Also llama.cpp's pairs of both.")
    min_tokens: NumTokens | None = None
    ignore_eos: bool | None = None
    bitwise: bool | None = Field(
        None,
        description="True: the text of plain decoding bit for bit, whatever is drafted and whoever else "
        "asks; what is drawn is drawn by the seed-stable rule. An error where the server does not keep it.",
    )
    speculation: Speculation | None = None

    @property
    def fast_forward(self) -> FastForward:
        """What becomes of text that a grammar forces."""
        return (self.speculation and self.speculation.fast_forward) or "exact"


# What an answer may be limited to: OpenAI's response_format, llama.cpp's json_schema and grammar, vLLM's
# structured_outputs and its older guided_ fields.


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

    name: SchemaName | None = None
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
        "whitespace_pattern": "White space by a pattern is not supported. Say disable_any_whitespace, "
        "or leave it out",
    }

    json_schema: Json | SchemaText | None = Field(None, alias="json")
    regex: str | None = None
    choice: AllowedTexts | None = None
    grammar: str | None = Field(None, description=_DIALECTS)
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
    grammar: str | None = Field(None, description=_DIALECTS)
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | SchemaText | None = None
    guided_regex: str | None = None
    guided_choice: AllowedTexts | None = None
    guided_grammar: str | None = None
