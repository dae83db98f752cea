"""An answer and its choices as they grow, and the log probabilities of their tokens."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from outrider.core.contracts import Vocabulary
from outrider.core.data import TokenLogprob, Update
from outrider.formats import ContentDelta, Event, Reader, ReasoningDelta, ToolCallStart
from outrider.formats.reader import EventBuffer
from outrider.server.jobs import Job

_MIN_LOGPROB = -9_999.0
"""What OpenAI gives for a token that is next to impossible; JSON has no infinity."""


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one generation has given so far. `reader` splits calls and reasoning from content; without one
    everything is content. `target_calls` and `generated_tokens` are so far."""

    index: int
    job: Job
    reader: Reader | None = None
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    target_calls: int = 0
    generated_tokens: int = 0
    _scored: list[TokenLogprob] = field(default_factory=list)

    def take(self, update: Update | None) -> list[Event]:
        """What an update adds; None: the generation has ended."""
        if update is None:
            events = self.reader.end() if self.reader else []
        else:
            self.target_calls += update.record.kind == "decode"
            self.generated_tokens += len(update.record.tokens)
            self._scored += update.record.logprobs
            events = self._read([(piece.text, piece.source) for piece in update.pieces])
        for event in events:
            self._keep(event)
        return events

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
            "target_calls": self.target_calls,
            "generated_tokens": self.generated_tokens,
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
