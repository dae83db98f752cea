"""A streamed answer of OpenAI's API, read and timed: when text came, how much, and what was drafted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from outrider.bench.servers import RefusedError
from outrider.core.data import Grammar
from outrider.core.params import SamplingParams


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
    prompt_tokens: int | None
    reused_tokens: int | None
    """tokens of the prompt that it took from earlier requests; None where it does not say"""
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
    heard = _Heard()
    for event in _events(lines):
        heard.take(event, perf_counter())
    if not heard.finish_reason:
        raise StreamError("its answer breaks off: it never said why it ended")
    tokens = heard.num_tokens()
    if tokens is None:
        raise StreamError("it does not say how many tokens it wrote: no usage in its stream")
    return heard.answer(tokens, started_s)


@dataclass(slots=True)
class _Heard:
    """What a stream said so far."""

    text: list[str] = field(default_factory=list)
    is_whole_text: bool = True
    first_s: float | None = None
    last_text_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    """llama-server's"""
    account: dict[str, Any] = field(default_factory=dict)
    """Outrider's"""

    def take(self, event: dict[str, Any], now_s: float) -> None:
        """Note what an event says, and when it did."""
        if error := event.get("error"):
            said = error.get("message", error) if isinstance(error, dict) else error
            raise StreamError(f"it breaks off: {str(said)[:300]}")
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        self.account = event.get("outrider") or self.account
        for choice in event.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._hear(choice, now_s)

    def _hear(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or {}
        apart = delta.get("reasoning_content") or delta.get("reasoning")
        calls = delta.get("tool_calls")
        text = choice.get("text") or delta.get("content")
        self.text += [part for part in (apart, text) if part]
        if apart or calls:
            self.is_whole_text = False
        if apart or calls or text:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_text_s = now_s
        if reason := choice.get("finish_reason"):
            self.finish_reason = str(reason)
            self.last_s = now_s  # an end token takes its time, and brings no text

    def num_tokens(self) -> int | None:
        """As usage has it, else as the engine's own account does."""
        for found in (
            self.usage.get("completion_tokens"),
            self.timings.get("predicted_n"),
            self.account.get("generated_tokens"),
        ):
            if isinstance(found, int):
                return found
        return None

    def answer(self, tokens: int, started_s: float) -> Answer:
        """All of it, where everything has come."""
        first_s = self.last_s if self.first_s is None else self.first_s
        was_timed = self.last_text_s > first_s and tokens > 1
        drafted, accepted = self._drafted()
        return Answer(
            text="".join(self.text),
            is_whole_text=self.is_whole_text,
            tokens=tokens,
            timed_tokens=tokens - 1 if was_timed else 0,
            prefill_s=first_s - started_s,
            decode_s=self.last_s - first_s if was_timed else 0.0,
            prompt_tokens=self.usage.get("prompt_tokens"),
            reused_tokens=self._reused(),
            drafted=drafted,
            accepted=accepted,
            target_calls=self.account.get("target_calls"),
            draft_calls=self.account.get("draft_calls"),
            forced=self.account.get("forced_tokens", 0),
            finish_reason=self.finish_reason,
        )

    def _drafted(self) -> tuple[int | None, int | None]:
        if self.account:
            return self.account.get("drafted_tokens"), self.account.get("accepted_tokens")
        if self.timings:  # llama-server says nothing of drafts where nothing was drafted
            return self.timings.get("draft_n", 0), self.timings.get("draft_n_accepted", 0)
        return None, None

    def _reused(self) -> int | None:
        """llama-server's cache_n, else what usage says."""
        found = self.timings.get("cache_n")
        if found is None:
            found = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return found if isinstance(found, int) else None


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]; errors are events, too."""
    for line in lines:
        name, _, value = line.partition(":")
        if name not in ("data", "error") or not (value := value.strip()):
            continue
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError as error:
            raise StreamError(f"it sends what is no JSON: {value[:100]!r}") from error
        if not isinstance(event, dict):
            raise StreamError(f"it sends what is no object: {value[:100]!r}")
        yield {"error": event} if name == "error" else event


# What another engine is asked: the body of an OpenAI request, with what only some engines know.

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
    """A streamed request with usage. Where an engine can be asked to, it reads the prompt again.

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
    for penalty in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, penalty):
            sent[penalty] = value
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
