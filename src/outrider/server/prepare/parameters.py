"""A request's limits, sampling, speculation and grammar, in the engine's terms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outrider.core.data import Grammar
from outrider.core.errors import SettingError
from outrider.core.params import (
    Drafting,
    GrammarKind,
    JsonStyle,
    SamplingParams,
    Verification,
    grammar_kind,
)
from outrider.server.errors import invalid_field, problem_of
from outrider.server.protocol.base import (
    GrammarFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    Speculation,
)
from outrider.server.protocol.requests import ChatRequest, CompletionRequest
from outrider.server.settings import ServeSettings

_MIN_TEMPERATURE = 1e-4
"""Below it one token has all the weight: decoding is greedy, and no logit can become too large."""
_MIN_TOP_P = 1e-6
"""Keeps the most likely token alone, as 0 is meant to."""
_BARRED = -100.0
"""A bias that OpenAI's clients bar a token with."""


# What one request may ask for


def answer_tokens(settings: ServeSettings, asked: int | None, default: int | None, field: str) -> int | None:
    """How long an answer may get; None: no limit of its own. Raises Problem where more was asked for than is
    allowed."""
    if asked is not None and settings.max_tokens is not None and asked > settings.max_tokens:
        why = f"{asked} are more than this server gives, which is {settings.max_tokens}. Ask for fewer."
        raise invalid_field(field, why)
    if asked is not None:
        return asked
    known = [n for n in (settings.default_max_tokens or default, settings.max_tokens) if n is not None]
    return min(known, default=None)


def check_schema(settings: ServeSettings, size: int, field: str) -> None:
    """Raises Problem for a schema or grammar of so many bytes, if it is too large."""
    if size > settings.max_schema:
        why = f"it has {size:,} bytes, and {settings.max_schema:,} are the most. Shorten it."
        raise invalid_field(field, why, code="grammar_too_large")


def check_choices(settings: ServeSettings, number: int, field: str) -> None:
    """Raises Problem for so many choices, if they are too many."""
    if number > settings.max_choices:
        why = f"{number} choices are more than the {settings.max_choices} of this server. Ask for fewer."
        raise invalid_field(field, why)


# Sampling


def _biases(asked: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(token), bias if bias > _BARRED else float("-inf")) for token, bias in asked.items())


_SAMPLERS: dict[str, Callable[[Any], Any] | None] = {
    **dict.fromkeys(("min_p", "typical_p", "dynatemp_range", "dynatemp_exponent", "xtc_probability")),
    **dict.fromkeys(("xtc_threshold", "presence_penalty", "frequency_penalty", "repeat_penalty")),
    **dict.fromkeys(("repetition_penalty", "repeat_last_n", "dry_multiplier", "dry_base")),
    **dict.fromkeys(("dry_allowed_length", "dry_penalty_last_n", "min_tokens")),
    "temperature": lambda value: value if value >= _MIN_TEMPERATURE else 0.0,
    "top_p": lambda value: max(value, _MIN_TOP_P),
    "top_k": lambda value: max(value, 0),
    "top_n_sigma": lambda value: max(value, 0.0),
    "dry_sequence_breakers": tuple,
    "logit_bias": _biases,
}
"""The samplers' fields, and how those are converted whose values mean the same in other numbers."""
_ENGINE_NAMES = {
    "repetition_penalty": "repeat_penalty",
    "dry_penalty_last_n": "dry_last_n",
    "dry_sequence_breakers": "dry_breakers",
}
"""Fields that the engine has under another name."""


def sampling_of(fields: SamplingFields, defaults: SamplingParams) -> SamplingParams:
    """How the next token is chosen. Raises Problem."""
    if fields.repeat_penalty is not None and fields.repetition_penalty is not None:
        why = "it is another name of repeat_penalty. Leave one of them out."
        raise invalid_field("repetition_penalty", why)
    given: dict[str, Any] = {}
    for name, convert in _SAMPLERS.items():
        value = getattr(fields, name)
        if value is not None:
            given[_ENGINE_NAMES.get(name, name)] = convert(value) if convert else value
    if fields.seed is not None and fields.seed >= 0:
        given["seed"] = fields.seed
    return replace(defaults, **given)


# Speculation


def verification_of(
    fields: SamplingFields, defaults: Verification, sampling: SamplingParams, *, bitwise: bool
) -> Verification:
    """How drafts are checked; `bitwise`: this server can give equal bits. Raises Problem."""
    asked = {name: getattr(fields.speculation, name, None) for name in ("rule", "draft_sampling", "lenience")}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    try:
        verification = replace(defaults, **given)
    except SettingError as error:
        raise problem_of(error, "speculation") from None
    if not fields.bitwise:
        return verification
    if not bitwise:
        why = "this server does not give equal bits. Start it with --bitwise, or leave it out."
        raise invalid_field("bitwise", why, code="unsupported")
    try:
        return verification.bitwise(greedy=sampling.is_greedy)
    except SettingError as error:
        raise problem_of(error, "bitwise") from None


def drafting_of(speculation: Speculation | None, *, has_model: bool) -> Drafting | None:
    """Who drafts; None: nobody. Raises Problem for a draft model that is not there."""
    policy = (speculation and speculation.policy) or "auto"
    if policy == "model" and not has_model:
        why = "no draft model is loaded. Say auto or lookup, or start the server with one."
        raise invalid_field("speculation.policy", why)
    if policy == "plain":
        return None
    return Drafting(policy, speculation.max_draft if speculation else None)


# The one thing that limits an answer, whichever server's field it came in

_OBJECT = {"type": "object"}


def grammar_of(
    fields: ChatRequest | CompletionRequest, settings: ServeSettings
) -> tuple[Grammar | None, str]:
    """What limits the answer, and the field that says so; None and "" where nothing does.

    Raises Problem for two of them, and for a text that is too long.
    """
    found = [(name, kind, text) for name, kind, text in _grammar_fields(fields) if text is not None]
    structured, formatted = fields.structured_outputs, fields.response_format
    if structured is not None and not any(name.startswith("structured_outputs") for name, *_ in found):
        why = "it asks for nothing. Give json, regex, choice, grammar or json_object."
        raise invalid_field("structured_outputs", why)
    if not found:
        return None, ""
    name, kind, text = found[0]
    if len(found) > 1:
        why = f"the answer is limited by {name} already. Leave one of them out."
        raise invalid_field(found[1][0], why)
    check_schema(settings, len(text.encode("utf-8", errors="surrogatepass")), name)
    is_compact = structured is not None and structured.disable_any_whitespace and kind == "json_schema"
    is_lenient = isinstance(formatted, JsonSchemaFormat) and formatted.json_schema.strict is False
    style: JsonStyle = "compact" if is_compact else "spaced"
    return Grammar(kind, text, style=style, lenient=is_lenient, fast_forward=fields.fast_forward), name


def _grammar_fields(fields: GrammarFields) -> Iterator[tuple[str, GrammarKind, str | None]]:
    """Each field that may limit the answer, with the kind and the text of its grammar, if it is given."""
    asked = fields.response_format
    if isinstance(asked, JsonObjectFormat):
        schema = _OBJECT if asked.json_schema is None else asked.json_schema
        yield "response_format", "json_schema", _json(schema)
    elif isinstance(asked, JsonSchemaFormat):
        yield "response_format", "json_schema", _json(asked.json_schema.json_schema)
    yield "json_schema", "json_schema", _json(fields.json_schema)
    yield "grammar", grammar_kind(fields.grammar or ""), fields.grammar
    if (structured := fields.structured_outputs) is not None:
        yield "structured_outputs.json", "json_schema", _json(structured.json_schema)
        yield "structured_outputs.regex", "regex", structured.regex
        yield "structured_outputs.choice", "choice", _json(structured.choice)
        yield "structured_outputs.grammar", grammar_kind(structured.grammar or ""), structured.grammar
        any_object = _OBJECT if structured.json_object else None
        yield "structured_outputs.json_object", "json_schema", _json(any_object)
    yield "guided_json", "json_schema", _json(fields.guided_json)
    yield "guided_regex", "regex", fields.guided_regex
    yield "guided_choice", "choice", _json(fields.guided_choice)
    yield "guided_grammar", grammar_kind(fields.guided_grammar or ""), fields.guided_grammar


def _json(value: dict[str, Any] | list[str] | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
