"""An answer and its choices as they grow, and the log probabilities of their tokens."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from uuid import uuid4

from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, StepRecord, TokenLogprob, Update
from outrider.formats import ContentDelta, Event, Reader, ReasoningDelta, ToolCallStart
from outrider.formats.reader import EventBuffer
from outrider.policy import AutoPolicy
from outrider.server.jobs import Job
from outrider.server.prepare.plan import GenerationPlan
from outrider.session.readout import Readout, read_out
from outrider.session.speedup import Estimate, estimate_speedup

_MIN_LOGPROB = -9_999.0
"""What OpenAI gives for a token that is next to impossible; JSON has no infinity."""
_COUNTS = ("target_calls", "draft_calls", "generated_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one generation has given so far. `reader` splits calls and reasoning from content; without one
    everything is content. `counts` are so far."""

    index: int
    job: Job
    reader: Reader | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTS, 0)))
    _scored: list[TokenLogprob] = field(default_factory=list)

    def take(self, update: Update | None) -> list[Event]:
        """What an update adds; None: the generation has ended."""
        if update is None:
            events = self.reader.end() if self.reader else []
        else:
            self._count(update.record)
            self._scored += update.record.logprobs
            events = self._read([(piece.text, piece.source) for piece in update.pieces])
        for event in events:
            self._keep(event)
        return events

    def _count(self, record: StepRecord) -> None:
        if record.kind == "decode":
            spent = (1, record.work.calls, len(record.tokens), len(record.draft), record.num_accepted)
            self.counts.update(dict(zip(_COUNTS, spent, strict=True)))

    def _read(self, pieces: list[tuple[str, str]]) -> list[Event]:
        if self.reader is not None:
            return self.reader.push(*pieces)
        events = EventBuffer()
        events.content(pieces)
        return events.take()

    def _keep(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self.content += event.text
        elif isinstance(event, ReasoningDelta):
            self.reasoning += event.text
        elif isinstance(event, ToolCallStart):
            self.calls.append(ToolCall(f"call_{uuid4().hex[:24]}", event.name))
        else:
            self.calls[event.index].arguments += event.text

    def progress(self, events: Iterable[Event]) -> dict[str, Any]:
        """The `outrider` object of a chunk: whose text it has, and the counts so far."""
        return {
            "pieces": [[event.text, event.source] for event in events if isinstance(event, ContentDelta)],
            **self.counts,
        }

    def take_scored(self, vocabulary: Vocabulary, visible: Sequence[int] = ()) -> list[TokenLogprob]:
        """Tokens with their log probabilities that nobody has taken yet: those that are part of the text,
        none that only end it, or stand for structure."""
        scored, self._scored = self._scored, []
        return [
            one
            for one in scored
            if one.token in visible
            or not (vocabulary.ends_generation(one.token) or vocabulary.is_control(one.token))
        ]

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the choice ended, in OpenAI's terms."""
        if self.job.completion.finish_reason in ("length", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"


class Answer(ABC):
    """An answer that can be given whole or as the events of a stream."""

    done = "[DONE]"
    """what a stream that is whole ends with, if anything"""

    def take(self, choice: Choice, update: Update | None) -> None:
        """Read an update of a choice for the whole answer; None: the choice has ended."""
        choice.take(update)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer when every choice has ended."""

    @abstractmethod
    def first(self) -> Iterator[dict[str, Any]]:
        """The events before any text."""

    @abstractmethod
    def next(self, choice: Choice, update: Update | None) -> Iterator[dict[str, Any]]:
        """The events that an update of a choice gives; None: the choice has ended."""

    def failed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The event that ends a stream which cannot go on; `body` is an error's."""
        return body


def chat_logprobs(scored: Iterable[TokenLogprob], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """A chat's `logprobs.content`. A token that is a part of a character has U+FFFD for a text; its
    bytes are whole."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = _bytes(token, vocabulary)
        text = spelled.decode("utf-8", errors="replace")
        return {"token": text, "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(spelled)}

    return [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for one in scored
    ]


def _bytes(token: int, vocabulary: Vocabulary) -> bytes:
    """The text of a token; of one that shows none, its spelling."""
    return vocabulary.piece(token) or vocabulary.spelling(token)


class TextOffsets:
    """Where the tokens of a completion start in its text, in characters, from `start` on."""

    def __init__(self, vocabulary: Vocabulary, start: int = 0) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._position = start

    def logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A completion's `logprobs` for these tokens, which follow those before."""
        offsets = []
        for one in scored:
            offsets.append(self._position)
            self._position += len(self._decoder.decode(self._vocabulary.piece(one.token)))
        return {
            "tokens": [self._name(one.token) for one in scored],
            "token_logprobs": [max(one.logprob, _MIN_LOGPROB) for one in scored],
            "top_logprobs": [self._top(one) for one in scored],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        names = {self._name(token): max(logprob, _MIN_LOGPROB) for token, logprob in reversed(one.top)}
        return dict(reversed(names.items()))

    def _name(self, token: int) -> str:
        spelled = _bytes(token, self._vocabulary)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # as OpenAI spells a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


# What an answer took: `usage` in OpenAI's terms, and the `outrider` object (docs/api.md). All of it is
# derived from step records by `outrider.session.readout` and `outrider.session.explain`.

_FORCED = "grammar"
"""The source of drafted tokens that a grammar left no choice about."""
_DRAFTER_COUNTS = ("drafted_tokens", "accepted_tokens", "calls_saved")


def usage_of(plan: GenerationPlan, jobs: Sequence[Job], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Prompt and completion tokens. The choices of one prompt share it: it counts once for them."""
    completions = [job.completion for job in jobs]
    readouts = [read_out(completion) for completion in completions]
    prompts = completions[:: plan.choices_per_prompt]
    prompt_tokens = sum(completion.prompt_tokens for completion in prompts)
    generated = sum(readout.generated_tokens for readout in readouts)
    accepted = sum(readout.accepted_tokens for readout in readouts)
    drafted = sum(readout.drafted_tokens for readout in readouts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(completion.reused_tokens for completion in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def account_of(plan: GenerationPlan, jobs: Sequence[Job], policy: AutoPolicy | None) -> dict[str, Any]:
    """What speculation did. Of several choices counts add up, and `choices` has each one's."""
    each = [_of_choice(job, policy) for job in jobs]
    whole = {"policy": plan.policy, "rule": jobs[0].completion.rule, "lossy": jobs[0].completion.lossy}
    whole["bitwise"] = plan.bitwise
    whole |= each[0] if len(each) == 1 else _together(each)
    whole["notices"] = list(plan.notices)
    return whole


def _of_choice(job: Job, policy: AutoPolicy | None) -> dict[str, Any]:
    readout = read_out(job.completion)
    estimate, why = estimate_of(job.completion, policy)
    return _counts(readout) | {
        "times": _times(readout, job.queued_s),
        "estimated_speedup": asdict(estimate) if estimate else None,
        "estimated_speedup_unknown": why,
    }


def _counts(readout: Readout) -> dict[str, Any]:
    forced = readout.drafters.get(_FORCED)
    return {
        **{name: getattr(readout, name) for name in _COUNTS},
        "forced_tokens": forced.accepted_tokens if forced else 0,
        "tokens_per_target_call": readout.tokens_per_target_call,
        "drafters": {
            name: {count: getattr(counts, count) for count in _DRAFTER_COUNTS}
            for name, counts in readout.drafters.items()
        },
        "reused_prompt_tokens": readout.reused_tokens,
    }


def _times(readout: Readout, queued_s: float) -> dict[str, float]:
    time = readout.time_s
    return {
        "queued_s": queued_s,
        "prefill_s": readout.prefill_s,
        "decode_s": readout.decode_s,
        "target_s": time.verify,
        "draft_s": time.draft,
        "sampling_s": time.sampling,
        "constraint_s": time.constraint,
        "other_s": time.other,
    }


def _together(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several choices as one: counts add up, of times the longest holds, for the choices ran side by side."""
    first, drafters = each[0], dict[str, dict[str, int]]()
    for one in each:
        for name, counts in one["drafters"].items():
            so_far = drafters.setdefault(name, dict.fromkeys(counts, 0))
            for key, count in counts.items():
                so_far[key] += count
    whole: dict[str, Any] = {
        key: sum(one[key] for one in each) for key, value in first.items() if isinstance(value, int)
    }
    whole["tokens_per_target_call"] = whole["generated_tokens"] / max(whole["target_calls"], 1)
    whole["drafters"] = drafters
    whole["times"] = {key: max(one["times"][key] for one in each) for key in first["times"]}
    whole["estimated_speedup"] = None
    whole["estimated_speedup_unknown"] = "the choices were generated side by side"
    whole["choices"] = list(each)
    return whole


def estimate_of(completion: Completion, policy: AutoPolicy | None) -> tuple[Estimate | None, str | None]:
    """How much faster than plain decoding an answer was, or why it is not known."""
    if policy is None:
        return None, "what calls cost is not measured under this policy"
    return estimate_speedup(completion.records, policy)
