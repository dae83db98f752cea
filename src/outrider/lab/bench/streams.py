"""A streamed answer of OpenAI's API, read and timed: when text came, how much, and what was drafted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from outrider.core.data import Grammar
from outrider.core.params import SamplingParams
from outrider.lab.bench.servers import RefusedError


class StreamError(Exception):
    """A stream that is no whole answer; its text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What another engine answered, and how long it took as its client sees it.

    `prefill_s` is the time to the first token (to the first text), `decode_s` from there to the end.
    `timed_tokens` are the tokens that `decode_s` produced: all but the first. Both are 0 where everything
    came at once: then nothing was timed.
    """

    text: str
    """the answer; with reasoning in front of it where the engine takes the two apart"""
    is_whole_text: bool
    """whether `text` is all that was written: not where tool calls or reasoning were taken out of it"""
    tokens: int
    timed_tokens: int
    prefill_s: float
    decode_s: float
    drafted: int | None
    """None where it does not say"""
    accepted: int | None
    target_calls: int | None
    draft_calls: int | None
    forced: int
    finish_reason: str


def read_answer(lines: Iterable[str], started_s: float) -> Answer:
    """Read the lines of a response as they come. `started_s` is when it was asked, by `perf_counter`.

    Raises StreamError for what is no whole answer.
    """
    texts: list[str] = []
    is_whole_text, finish_reason = True, ""
    first_s, last_text_s, last_s = None, 0.0, 0.0
    said: dict[str, Any] = {"usage": {}, "timings": {}, "outrider": {}}  # the engines' own accounts
    for event in _events(lines):
        now_s = perf_counter()
        said |= {name: event[name] for name in said if event.get(name)}
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            apart = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text, calls = choice.get("text") or delta.get("content") or "", delta.get("tool_calls")
            texts += [apart, text]
            if apart or calls:
                is_whole_text = False
            if apart or calls or text:
                first_s = now_s if first_s is None else first_s
                last_text_s = now_s
            if reason := choice.get("finish_reason"):
                finish_reason = str(reason)
                last_s = now_s  # an end token takes its time, and brings no text
    if not finish_reason:
        raise StreamError("its answer breaks off: it never said why it ended")
    usage, timings, account = said.values()
    counts = usage.get("completion_tokens"), timings.get("predicted_n"), account.get("generated_tokens")
    tokens = next((count for count in counts if isinstance(count, int)), None)
    if tokens is None:
        raise StreamError("it does not say how many tokens it wrote: no usage in its stream")
    first_s = last_s if first_s is None else first_s
    was_timed = last_text_s > first_s and tokens > 1
    drafts = account.get("drafted_tokens"), account.get("accepted_tokens")
    if timings and not account:  # llama-server says nothing of drafts where nothing was drafted
        drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return Answer(
        text="".join(texts),
        is_whole_text=is_whole_text,
        tokens=tokens,
        timed_tokens=tokens - 1 if was_timed else 0,
        prefill_s=first_s - started_s,
        decode_s=last_s - first_s if was_timed else 0.0,
        drafted=drafts[0],
        accepted=drafts[1],
        target_calls=account.get("target_calls"),
        draft_calls=account.get("draft_calls"),
        forced=account.get("forced_tokens", 0),
        finish_reason=finish_reason,
    )


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]. An error among them is raised."""
    for line in lines:
        name, _, value = line.partition(":")
        if name not in ("data", "error") or not (value := value.strip()):
            continue
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError:
            raise StreamError(f"it sends what is no JSON: {value[:100]!r}") from None
        if not isinstance(event, dict):
            raise StreamError(f"it sends what is no object: {value[:100]!r}")
        if error := event if name == "error" else event.get("error"):
            said = error.get("message", error) if isinstance(error, dict) else error
            raise StreamError(f"it breaks off: {str(said)[:300]}")
        yield event


# What another engine is asked: the body of an OpenAI request, with what only some engines know.

Engine = Literal["llama-server", "outrider", "vllm", "other"]
"""Who answers, as far as its list of models says: decides which fields beside OpenAI's it is sent."""

_OFF = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
_BEYOND_OPENAI = ("top_k", "min_p", "typical_p", "top_n_sigma", "repeat_penalty", "repeat_last_n")
_VLLM_NAMES = {"top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty"}
_UNSENT = ("dynatemp_range", "xtc_probability", "dry_multiplier", "logit_bias", "banned", "min_tokens")


def body_of(
    name: str,
    engine: Engine,
    *,
    sampling: SamplingParams,
    grammar: Grammar | None,
    is_raw: bool,
    salt: str,
) -> dict[str, Any]:
    """The fields of a streamed request with usage that depend on who is asked. Where an engine can be asked
    to, it reads the prompt again. `is_raw`: a text is continued, no conversation.

    Raises RefusedError for what this engine cannot be asked: the same request would not be made of it.
    """
    fresh: dict[str, dict[str, Any]] = {"llama-server": {"cache_prompt": False}, "vllm": {"cache_salt": salt}}
    return {
        "stream": True,
        "stream_options": {"include_usage": True},
        **_sampling(name, engine, sampling),
        **fresh.get(engine, {}),
        **(_grammar(name, engine, grammar, is_raw=is_raw) if grammar else {}),
    }


def _sampling(name: str, engine: Engine, sampling: SamplingParams) -> dict[str, Any]:
    if unsent := [field for field in _UNSENT if getattr(sampling, field) != getattr(_OFF, field)]:
        raise RefusedError(name, f"it cannot be asked for {', '.join(unsent)}", "Leave it out of the plan.")
    sent: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.seed is not None:
        sent["seed"] = sampling.seed
    penalties = {name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty")}
    sent |= {name: value for name, value in penalties.items() if value}
    if sampling.is_greedy and sampling.repeat_penalty == 1:
        return sent
    beyond = {field: getattr(sampling, field) for field in _BEYOND_OPENAI}
    if engine in ("llama-server", "outrider"):
        return sent | beyond
    acting = ["repeat_penalty"] if sampling.is_greedy else [f for f in beyond if f != "repeat_last_n"]
    changed = {field: beyond[field] for field in acting if beyond[field] != getattr(_OFF, field)}
    known = _VLLM_NAMES if engine == "vllm" else {}
    if changed.keys() <= known.keys():
        return sent | {known[field]: value for field, value in changed.items()}
    why = f"it would sample otherwise: it knows no {', '.join(changed)}"
    raise RefusedError(name, why, "Compare at temperature 0.")


def _grammar(name: str, engine: Engine, grammar: Grammar, *, is_raw: bool) -> dict[str, Any]:
    if grammar.kind == "json_schema" and is_raw and engine == "llama-server":
        return {"json_schema": json.loads(grammar.text)}
    if grammar.kind == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": json.loads(grammar.text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if grammar.kind == "json":
        return {"response_format": {"type": "json_object"}}
    if grammar.kind == "gbnf" and engine in ("llama-server", "outrider"):
        return {"grammar": grammar.text}
    raise RefusedError(name, f"it cannot be asked for a {grammar.kind} grammar", "Use a JSON schema.")
