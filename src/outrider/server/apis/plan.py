"""What one HTTP request asks of the engine, and how its answers are to be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from outrider.core.data import Grammar, Request
from outrider.core.errors import InputError, SettingError
from outrider.core.notices import notify
from outrider.core.params import Drafting, GrammarKind, SamplingParams, Verification, grammar_kind
from outrider.drafters.model import ModelDrafter
from outrider.drafters.prediction import PredictionDrafter
from outrider.server.apis.shapes import (
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    TextRequest,
    text_of,
)
from outrider.server.errors import invalid_field, problem_of
from outrider.server.service import Service
from outrider.server.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Engine requests, one for each choice, in the order of their indices."""

    requests: tuple[Request, ...]
    policy: str
    bitwise: bool
    choices_per_prompt: int
    show_sources: bool
    """whether a stream says who drafted its text"""
    repeats: bool = True
    """whether the same request gets the same answer, if it has a seed"""
    max_decode_s: float | None = None
    """After so many seconds an answer ends once it has begun a new line."""


def plan_of(
    service: Service, body: TextRequest, asked: Request, prompts: Sequence[tuple[int, ...]]
) -> GenerationPlan:
    """`body.n` choices for each prompt. `asked` has what the body does not say by itself; its grammar is
    compiled already. Raises Problem."""
    speculation, bitwise = body.speculation, service.session.bitwise
    policy = (speculation and speculation.policy) or "auto"
    if policy == "model" and service.draft_name is None:
        why = "no draft model is loaded. Use auto or lookup, or start the server with one."
        raise invalid_field("speculation.policy", why)
    longest_draft = speculation.max_draft if speculation else None
    drafting = Drafting() if policy == "plain" else Drafting(policy, longest_draft)
    sampling = _sampling(body, service.defaults)
    verification = _verification(body, service.verification, sampling, bitwise=bitwise)
    unrepeatable = verification.unrepeatable(sampling) if policy != "plain" else None
    notify(unrepeatable and f"seed: {unrepeatable}")
    drafters = service.session.engine.drafters
    longest = min((d.longest_text for d in drafters if isinstance(d, ModelDrafter)), default=sys.maxsize)
    if max(map(len, prompts)) >= longest:
        notify(f"the draft model is not asked: its context of {longest} tokens does not hold the prompt")
    request = replace(
        asked,
        sampling=sampling,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        ignore_end=bool(body.ignore_eos),
        speculate=policy != "plain",
        verification=verification,
        drafting=drafting,
        prediction=_predicted(service, body),
        cache_prompt=service.settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
    )
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(body.n or 1)]
    keeps_text = policy == "plain" or verification.keeps_text(greedy=sampling.is_greedy)
    return GenerationPlan(
        requests=tuple(
            replace(request, prompt=prompt, sampling=replace(sampling, seed=seed))
            for prompt in prompts
            for seed in seeds
        ),
        policy=service.policy_name if policy == "auto" else policy,
        bitwise=bitwise and keeps_text,
        repeats=unrepeatable is None,
        choices_per_prompt=len(seeds),
        show_sources=bool(speculation and speculation.show_sources),
    )


def _predicted(service: Service, body: TextRequest) -> tuple[int, ...]:
    """The tokens of a prediction, as many as the context holds. Control tokens that it spells are text."""
    if body.prediction is None:
        return ()
    if not any(isinstance(d, PredictionDrafter) for d in service.session.engine.drafters):
        notify("prediction: it is not used, for this model cannot follow one")
    text = text_of(body.prediction.content)[: service.max_characters]
    try:
        tokens = service.vocabulary.tokenize(text, add_special=False)
    except InputError as error:
        raise problem_of(error, "prediction") from None
    return tuple(tokens[: service.context_tokens])


def compile_grammar(service: Service, body: TextRequest, grammar: Grammar, field: str) -> None:
    """Compile the grammar of a field. Raises Problem."""
    if body.ignore_eos:
        why = f"{field} says where the answer ends. Leave one of the two out."
        raise invalid_field("ignore_eos", why)
    service.compile(grammar, field)


# What one request may ask for


def answer_tokens(settings: ServeSettings, asked: int | None, default: int | None, field: str) -> int | None:
    """How long an answer may get; None: no limit but the context. -1 asks for no limit. Raises Problem where
    more was asked for than is allowed."""
    if asked == -1:
        return settings.max_tokens
    if asked is not None and settings.max_tokens is not None and asked > settings.max_tokens:
        why = f"{asked} are more than this server gives, which is {settings.max_tokens}. Ask for fewer."
        raise invalid_field(field, why)
    if asked is not None:
        return asked
    known = [n for n in (settings.default_max_tokens or default, settings.max_tokens) if n is not None]
    return min(known, default=None)


_MAX_SCHEMA_BYTES = 256 * 2**10


def check_schema(size: int, field: str) -> None:
    """Raises Problem for a schema or grammar of too many bytes."""
    if size > _MAX_SCHEMA_BYTES:
        why = f"it has {size:,} bytes, and {_MAX_SCHEMA_BYTES:,} are the most. Shorten it."
        raise invalid_field(field, why, code="grammar_too_large")


# Sampling and verification


_MIN_TEMPERATURE = 1e-4
"""Below it one token has all the weight, so decoding is greedy: no logit becomes too large."""
_BARRED = -100.0
"""The bias by which OpenAI's clients bar a token."""


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda value: value if value >= _MIN_TEMPERATURE else 0.0,
    "dry_sequence_breakers": tuple,
    "logit_bias": lambda biases: tuple(
        (int(token), bias if bias > _BARRED else float("-inf")) for token, bias in biases.items()
    ),
    "seed": lambda value: value if value >= 0 else None,
}
"""How the engine writes the values of some fields."""
_PARAMETERS = {parameter.name for parameter in dataclass_fields(SamplingParams)}
_SAMPLERS: dict[str, dict[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
"""llama.cpp's names of samplers, in their order, and the values that switch them off."""
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature"}


def _sampling(body: SamplingFields, defaults: SamplingParams) -> SamplingParams:
    given = {
        name: _CONVERSIONS[name](value) if name in _CONVERSIONS else value
        for name, value in body.sampling().items()
        if name in _PARAMETERS
    }
    if body.samplers is not None:
        named = [_OTHER_NAMES.get(name, name) for name in body.samplers]
        for sampler, off in _SAMPLERS.items():
            given |= {} if sampler in named else off
        notify(*(f"samplers: {name[:64]} is not known here" for name in named if name not in _SAMPLERS))
        known = [name for name in named if name in _SAMPLERS]
        if known != (ordered := [name for name in _SAMPLERS if name in known]):
            notify(f"samplers: their order is {', '.join(ordered)}")
    return replace(defaults, **given)


def _verification(
    body: SamplingFields, defaults: Verification, sampling: SamplingParams, *, bitwise: bool
) -> Verification:
    """How drafts are verified; `bitwise`: whether this server can give equal bits. Raises Problem."""
    asked = {name: getattr(body.speculation, name, None) for name in ("rule", "draft_sampling")}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if body.bitwise and not bitwise:
        why = "this server does not give equal bits. Start it with --bitwise, or leave it out."
        raise invalid_field("bitwise", why, code="unsupported")
    field = "speculation"
    try:
        verification = replace(defaults, **given)
        field = "bitwise"
        bits = verification.bitwise(greedy=sampling.is_greedy) if body.bitwise else verification
        return bits.seeded(sampling)
    except SettingError as error:
        raise problem_of(error, field) from None


# The one thing that limits an answer, whichever server's field it came in

_OBJECT = {"type": "object"}


def grammar_of(body: TextRequest) -> tuple[Grammar | None, str]:
    """The grammar of the answer and its field; None and "" where nothing limits it. Raises Problem for two of
    them, and for one that is too long."""
    found = [row for row in limits_of(body) if row[2] is not None]
    if not found:
        return None, ""
    name, kind, value = found[0]
    if len(found) > 1:
        why = f"the answer is limited by {name} already. Leave one of them out."
        raise invalid_field(found[1][0], why)
    text = value if isinstance(value, str) else json.dumps(value)
    check_schema(len(text.encode("utf-8", errors="surrogatepass")), name)
    structured, formatted = body.structured_outputs, body.response_format
    is_compact = structured is not None and structured.disable_any_whitespace and kind == "json_schema"
    grammar = Grammar(
        kind or grammar_kind(text),
        text,
        style="compact" if is_compact else "spaced",
        lenient=isinstance(formatted, JsonSchemaFormat) and formatted.json_schema.strict is False,
        fast_forward=body.fast_forward,
    )
    return grammar, name


def limits_of(body: TextRequest) -> Iterator[tuple[str, GrammarKind, Any]]:
    """Each field that may limit the answer, the kind of its grammar ("": its text tells), and its value."""
    asked, structured = body.response_format, body.structured_outputs
    if isinstance(asked, JsonObjectFormat):
        yield "response_format", "json_schema", _OBJECT if asked.json_schema is None else asked.json_schema
    elif isinstance(asked, JsonSchemaFormat):
        yield "response_format", "json_schema", asked.json_schema.json_schema
    yield "json_schema", "json_schema", body.json_schema
    yield "grammar", "", body.grammar
    if structured is not None:
        yield "structured_outputs.json_object", "json_schema", _OBJECT if structured.json_object else None
        yield "structured_outputs.json", "json_schema", structured.json_schema
        yield "structured_outputs.regex", "regex", structured.regex
        yield "structured_outputs.choice", "choice", structured.choice
        yield "structured_outputs.grammar", "", structured.grammar
