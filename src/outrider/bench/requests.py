"""What another engine is asked: the body of an OpenAI request, with what only some engines know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from outrider.bench.servers import RefusedError
from outrider.core.data import Grammar
from outrider.core.params import SamplingParams

Engine = Literal["llama-server", "outrider", "vllm", "other"]
"""Who answers, as far as its list of models says: decides which fields beside OpenAI's it is sent."""

_OFF = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
_BEYOND_OPENAI = ("top_k", "min_p", "typical_p", "top_n_sigma", "repeat_penalty", "repeat_last_n")
_UNSENT = ("dynatemp_range", "xtc_probability", "dry_multiplier", "logit_bias", "banned", "min_tokens")


def body_of(
    name: str,
    engine: Engine,
    prompt: Sequence[Mapping[str, Any]] | str,
    *,
    model: str | None,
    grammar: Grammar | None,
    tools: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    max_tokens: int,
    salt: str,
) -> dict[str, Any]:
    """A streamed request with usage. Where an engine can be asked to, it reads the prompt anew.

    Raises RefusedError for what this engine cannot be asked: the same request would not be made of it.
    """
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(name, engine, sampling),
        **_fresh(engine, salt),
    }
    body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(m) for m in prompt]}
    if model is not None:
        body["model"] = model
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    return body | (_grammar(name, engine, grammar, raw=isinstance(prompt, str)) if grammar else {})


def _sampling(name: str, engine: Engine, sampling: SamplingParams) -> dict[str, Any]:
    sent: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.seed is not None:
        sent["seed"] = sampling.seed
    for field in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, field):
            sent[field] = value
    unsent = [field for field in _UNSENT if getattr(sampling, field) != getattr(_OFF, field)]
    if unsent:
        raise RefusedError(name, f"it cannot be asked for {', '.join(unsent)}", "Leave it out of the plan.")
    if sampling.is_greedy and sampling.repeat_penalty == 1:
        return sent
    beyond = {field: getattr(sampling, field) for field in _BEYOND_OPENAI}
    if engine in ("llama-server", "outrider"):
        return sent | beyond
    changed = [field for field, value in beyond.items() if _acts(field, value, sampling)]
    if engine == "vllm" and set(changed) <= {"top_k", "min_p", "repeat_penalty"}:
        return sent | {_VLLM_NAMES.get(field, field): beyond[field] for field in changed}
    if changed:
        why = f"it would sample otherwise: it knows no {', '.join(changed)}"
        raise RefusedError(name, why, "Compare at temperature 0.")
    return sent


_VLLM_NAMES = {"repeat_penalty": "repetition_penalty"}


def _acts(field: str, value: float, sampling: SamplingParams) -> bool:
    """Whether a sampler is on; a window alone is not."""
    if field == "repeat_last_n":
        return False
    return bool(value != getattr(_OFF, field)) and (field == "repeat_penalty" or not sampling.is_greedy)


def _fresh(engine: Engine, salt: str) -> dict[str, Any]:
    """Asks for no reuse of a prompt's beginning, where that can be asked."""
    match engine:
        case "llama-server":
            return {"cache_prompt": False}
        case "vllm":
            return {"cache_salt": salt}
        case _:
            return {}


def _grammar(name: str, engine: Engine, grammar: Grammar, *, raw: bool) -> dict[str, Any]:
    both = engine in ("llama-server", "outrider")
    match grammar.kind:
        case "json_schema" if raw and engine == "llama-server":
            return {"json_schema": json.loads(grammar.text)}
        case "json_schema":
            schema = {"name": "answer", "strict": True, "schema": json.loads(grammar.text)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "json":
            return {"response_format": {"type": "json_object"}}
        case "gbnf" if both:
            return {"grammar": grammar.text}
        case kind:
            raise RefusedError(name, f"it cannot be asked for a {kind} grammar", "Use a JSON schema.")
