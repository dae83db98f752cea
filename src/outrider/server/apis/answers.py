"""Answers and their choices as they grow, the log probabilities of their tokens, and what they took.

An answer is given whole or as a stream. OpenAI's come in chunks, those of typed events in parts.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal
from uuid import uuid4

from outrider.core.data import Completion, Kind, Piece, Request, Update
from outrider.policy.auto import AutoPolicy
from outrider.server.apis.plan import GenerationPlan
from outrider.server.apis.shapes import Json, TextRequest
from outrider.server.errors import Problem
from outrider.server.service import Service
from outrider.session.readout import read_out
from outrider.session.speedup import Estimate, estimate_speedup

EVENTS, LINES = "text/event-stream", "application/x-ndjson"

_MIN_LOGPROB = -9_999.0
"""OpenAI's value for a token that is next to impossible; JSON has no infinity."""
_KINDS: tuple[Kind, ...] = ("reasoning", "content", "call")
_OF_DRAFTERS = ("drafted_tokens", "accepted_tokens", "calls_saved")
_COUNTS = ("target_calls", "draft_calls", "generated_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one generation has given so far."""

    index: int
    request: Request
    pieces: list[Piece] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTS, 0)))
    queued_s: float = 0.0
    is_cut: bool = False
    """whether the server ended it because of the request's time limit"""
    is_over: bool = False
    completion: Completion = field(init=False)
    """set when the generation is over"""

    def take(self, outcome: Update | Completion) -> Sequence[Piece]:
        """Add the outcome of a step, or the end; returns the pieces that it gives."""
        if isinstance(outcome, Completion):
            self.completion, self.is_over, pieces = outcome, True, merged(outcome.rest)
        else:
            record, pieces = outcome.record, merged(outcome.pieces)
            if record.kind == "decode":
                spent = (1, record.work.calls, len(record.tokens), len(record.draft), record.num_accepted)
                self.counts.update(dict(zip(_COUNTS, spent, strict=True)))
        for piece in pieces:
            if piece.name:
                self.calls.append(ToolCall(f"call_{uuid4().hex[:24]}", piece.name))
            elif piece.kind == "call":
                self.calls[piece.call].arguments += piece.text
        self.pieces += pieces
        return pieces

    @property
    def content(self) -> str:
        return joined(self.pieces, "content")

    @property
    def reasoning(self) -> str:
        return joined(self.pieces, "reasoning")

    def progress(self, pieces: Iterable[Piece]) -> Json:
        """The `outrider` object of a chunk: the sources of its content, and the counts so far."""
        shown = [[piece.text, piece.source] for piece in pieces if piece.kind == "content"]
        return {"pieces": shown, **self.counts}

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the choice ended, in OpenAI's terms."""
        if self.completion.finish_reason in ("length", "context", "cancelled"):
            return "length"
        return "tool_calls" if self.calls else "stop"


class Answer(ABC):
    """An answer that can be given whole or as the events of a stream. `id` has no prefix; `notices` say what
    of the request was not enforced, not read, not used."""

    media_type = EVENTS
    """of the stream: server-sent events, or lines of JSON"""
    done = ""
    """what follows the last event of a complete stream"""

    def __init__(self, service: Service, plan: GenerationPlan) -> None:
        self.service = service
        self.plan = plan
        self.id = uuid4().hex
        self.notices: list[str] = []
        self.choices = [Choice(i, request) for i, request in enumerate(plan.requests)]

    @abstractmethod
    def whole(self) -> Any:
        """The complete answer as JSON data, when every choice has ended."""

    def first(self) -> Iterator[Json]:
        """The events before any text."""
        yield from ()

    @abstractmethod
    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        """The events for what a choice has taken: more pieces, and its end where it is over."""

    def failed(self, problem: Problem, path: str) -> Json:
        """The event that ends a stream with an error, at the path of this API."""
        return problem.body_at(path)

    def sums(self) -> Json:
        """`usage` in OpenAI's terms, `metrics` in vLLM's, and the `outrider` object (docs/api.md): what
        speculation did. For several choices its counts are sums, and `choices` has those of each."""
        each = [account_of(choice, self.service.policy) for choice in self.choices]
        completion = self.choices[0].completion
        account = {
            "policy": self.plan.policy,
            "rule": completion.rule,
            "lossy": completion.lossy,
            "bitwise": self.plan.bitwise,
            **(each[0] if len(each) == 1 else _together(each)),
            "notices": self.notices,
        }
        first_choices = self.choices[:: self.plan.choices_per_prompt]  # those of one prompt share it
        prompts = [choice.completion for choice in first_choices]
        prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": account["generated_tokens"],
            "total_tokens": prompt_tokens + account["generated_tokens"],
            "prompt_tokens_details": {
                "cached_tokens": sum(completion.reused_tokens for completion in prompts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": account["reasoning_tokens"],
                "audio_tokens": 0,
                "accepted_prediction_tokens": account["accepted_tokens"],
                "rejected_prediction_tokens": account["drafted_tokens"] - account["accepted_tokens"],
            },
        }
        counts = _counts_of_drafts(completion) if len(each) == 1 else None
        return {"usage": usage, "metrics": {"speculative_decoding": counts}, "outrider": account}


class PartedAnswer(Answer):
    """An answer of one choice in parts (blocks, items), whole or as events; both come of the same parts. Each
    part is opened, grows and is closed before the next is opened."""

    types: ClassVar[Mapping[Kind, str]]
    """what a part of each kind is called"""

    def __init__(self, service: Service, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        [self._choice] = self.choices
        self._parts: list[Json] = []
        self._is_open = False
        """whether the last part may still grow"""

    def whole(self) -> Json:
        for _ in self.next(self._choice, self._choice.pieces):
            pass
        return self._whole()

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        for piece in pieces:
            kind = self.types[piece.kind]
            if not self._is_open or self._parts[-1]["type"] != kind or piece.name:
                yield from self._close()
                yield from self._open(kind, piece)
            if not piece.name:
                yield self._grow(piece)
        if choice.is_over:
            yield from self._end()

    # What an API's answer is made of: the whole one, when its parts are complete, and the events that begin a
    # part with its first piece, add to the last part, end it if it is open, and end the answer.

    @abstractmethod
    def _whole(self) -> Json: ...
    @abstractmethod
    def _open(self, kind: str, piece: Piece) -> Iterator[Json]: ...
    @abstractmethod
    def _grow(self, piece: Piece) -> Json: ...
    @abstractmethod
    def _close(self) -> Iterator[Json]: ...
    @abstractmethod
    def _end(self) -> Iterator[Json]: ...


class ChunkedAnswer(Answer):
    """An answer of OpenAI's: choices, which a stream gives in chunks."""

    done = "[DONE]"
    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    nothing: ClassVar[Any]
    """what a choice's last chunk adds"""

    def __init__(self, service: Service, body: TextRequest, plan: GenerationPlan) -> None:
        super().__init__(service, plan)
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._with_usage_so_far = bool(self._with_usage and options and options.continuous_usage_stats)
        self._num_open = len(self.choices)
        self._head = {
            "id": f"{self.id_prefix}{self.id}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint if plan.repeats else None,
        }

    def whole(self) -> Json:
        choices = [self._whole(choice) for choice in self.choices]
        return {**self._head, "object": self.object, "choices": choices, **self.sums()}

    def next(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[Json]:
        for delta, shown in self._deltas(choice, pieces):
            chunk = self._chunk(choice, delta, shown)
            if self.plan.show_sources:
                chunk["outrider"] = choice.progress(shown)
            yield chunk
        if choice.is_over:
            self._num_open -= 1
            chunk = self._chunk(choice, self.nothing, finish_reason=choice.finish_reason)
            if self._num_open:
                yield chunk
            elif self._with_usage:
                yield chunk
                yield {**self._head, "choices": [], **self.sums()}
            else:
                sums = self.sums()
                yield chunk | {"metrics": sums["metrics"], "outrider": sums["outrider"]}

    def _chunk(
        self, choice: Choice, delta: Any, pieces: Sequence[Piece] = (), finish_reason: str | None = None
    ) -> Json:
        chunk = {**self._head, "choices": [self._entry(choice, delta, pieces, finish_reason)]}
        if not self._with_usage:
            return chunk
        return chunk | {"usage": self._usage_so_far() if self._with_usage_so_far else None}

    def _usage_so_far(self) -> dict[str, int]:
        prompt = sum(len(one.request.prompt) for one in self.choices[:: self.plan.choices_per_prompt])
        answer = sum(one.counts["generated_tokens"] for one in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    @abstractmethod
    def _whole(self, choice: Choice) -> Json:
        """The entry of `choices` in the whole answer."""

    @abstractmethod
    def _deltas(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[tuple[Any, Sequence[Piece]]]:
        """The deltas for these pieces, as few as possible, and the pieces of each."""

    @abstractmethod
    def _entry(self, choice: Choice, delta: Any, pieces: Sequence[Piece], finish_reason: str | None) -> Json:
        """The entry of `choices` in a chunk that has these pieces."""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind, call and source as one: those of a step make few chunks."""
    found: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (piece.kind, piece.call, piece.name, piece.source)):
        first, *others = group
        for other in others:
            tokens, logprobs = first.tokens + other.tokens, first.logprobs + other.logprobs
            first = first._replace(text=first.text + other.text, tokens=tokens, logprobs=logprobs)
        found.append(first)
    return found


def joined(pieces: Iterable[Piece], kind: Kind) -> str:
    """The text of the pieces of one kind."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def logprobs_of(
    pieces: Iterable[Piece], service: Service, kind: Kind = "content", *, with_ids: bool = False
) -> list[Json]:
    """The log probabilities of the tokens of pieces of one kind, in the shape of a chat's `logprobs.content`.
    A token that is part of a character has U+FFFD as its text and its true bytes."""

    def entry(token: int, logprob: float) -> Json:
        spelled = service.spelled(token)
        text = spelled.decode("utf-8", errors="replace")
        found = {"token": text, "logprob": finite(logprob), "bytes": list(spelled)}
        return {"id": token, **found} if with_ids else found

    return [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for piece in pieces
        for one in piece.logprobs
        if piece.kind == kind
    ]


def parsed_arguments(text: str) -> Json | None:
    """The arguments of a tool call; None for one that was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def finite(logprob: float) -> float:
    """A log probability as JSON has it."""
    return max(logprob, _MIN_LOGPROB)


def account_of(choice: Choice, policy: AutoPolicy | None) -> Json:
    """What speculation did for one choice."""
    readout = read_out(choice.completion)
    forced, time = readout.drafters.get("grammar"), readout.time_s
    estimate, why = estimate_of(choice.completion, policy)
    kinds = Counter(choice.completion.kinds)
    return {
        **{name: getattr(readout, name) for name in _COUNTS},
        **{f"{kind}_tokens": kinds[kind] for kind in _KINDS},
        "forced_tokens": forced.accepted_tokens if forced else 0,
        "tokens_per_target_call": readout.tokens_per_target_call,
        "drafters": {
            name: {kind: getattr(counts, kind) for kind in _OF_DRAFTERS}
            for name, counts in readout.drafters.items()
        },
        "reused_prompt_tokens": readout.reused_tokens,
        "respelled_prompt_tokens": choice.completion.respelled_tokens,
        "times": {
            "queued_s": choice.queued_s,
            "prefill_s": readout.prefill_s,
            "decode_s": readout.decode_s,
            "target_s": time.verify,
            "draft_s": time.draft,
            "sampling_s": time.sampling,
            "constraint_s": time.constraint,
            "other_s": time.other,
        },
        "estimated_speedup": asdict(estimate) if estimate else None,
        "estimated_speedup_unknown": why,
    }


def _counts_of_drafts(completion: Completion) -> Json | None:
    """What became of drafts, as vLLM says it: of the steps that had one. None where none had."""
    steps = [record for record in completion.records if record.kind == "decode" and len(record.draft)]
    if not steps:
        return None
    drafted = [len(record.draft) for record in steps]
    accepted = [record.num_accepted for record in steps]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [accepted.count(number) for number in range(max(drafted) + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted),
    }


def _together(each: Sequence[Json]) -> Json:
    """Several choices as one: counts are sums, times the longest, for the choices ran side by side."""
    first, drafters = each[0], dict[str, Counter[str]]()
    for name, counts in (item for one in each for item in one["drafters"].items()):
        drafters.setdefault(name, Counter()).update(counts)
    whole: Json = {
        key: sum(one[key] for one in each) for key, value in first.items() if isinstance(value, int)
    }
    return whole | {
        "tokens_per_target_call": whole["generated_tokens"] / max(whole["target_calls"], 1),
        "drafters": drafters,
        "times": {key: max(one["times"][key] for one in each) for key in first["times"]},
        "estimated_speedup": None,
        "estimated_speedup_unknown": "the choices were generated side by side",
        "choices": list(each),
    }


def estimate_of(completion: Completion, policy: AutoPolicy | None) -> tuple[Estimate | None, str | None]:
    """How much faster than plain decoding an answer was, or why that is not known."""
    if policy is None:
        return None, "what calls cost is not measured under this policy"
    return estimate_speedup(completion.records, policy)
