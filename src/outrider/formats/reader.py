"""An answer split into content, reasoning and tool calls while it is being written, character by character.

Text is held back only as long as it may turn out to be something else than content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from outrider.formats.conversation import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningMarkers,
    ToolArgumentsDelta,
    ToolCallStart,
)
from outrider.formats.scan import BLANKS, Refused, expect
from outrider.formats.syntaxes import CallSyntax

_MAX_HELD = 16_384
"""Characters that may wait for it to become certain that they are a call."""

Character = tuple[str, str]
"""A character and who drafted it."""


class EventBuffer:
    """Events since the last `take`; neighbours of one kind, call and source are joined."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Callable[..., Event], tuple[int, ...], str, str]] = []

    def content(self, texts: Iterable[Character]) -> None:
        """Text of the answer, with its sources."""
        self.add(ContentDelta, texts)

    def add(self, kind: Callable[..., Event], texts: Iterable[Character], *index: int) -> None:
        """Text of any kind, with its sources; `index` is the call's that it belongs to."""
        self._pieces += ((kind, index, source, text) for text, source in texts)

    def take(self) -> list[Event]:
        """All events so far, which are forgotten."""
        pieces, self._pieces = self._pieces, []
        joined = groupby(pieces, key=lambda piece: piece[:3])
        return [
            kind(*index, "".join(text for *_, text in group), source)
            for (kind, index, source), group in joined
        ]


class Reader:
    """One answer, read as it is written, in pieces of any size: the events that come of them, joined, are
    the same.

    Calls are looked for if there are `names` of tools. `separates` says whether reasoning is split off; if
    not, it is content like the rest, in which no call is looked for. `opened` says that the prompt ends
    inside the reasoning. What turns out to be no call is content, and a call that breaks off keeps what
    has come of it. White space next to a marker belongs to it, unless there is text on both sides.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        names: Collection[str],
        markers: ReasoningMarkers,
        *,
        separates: bool,
        opened: bool,
    ) -> None:
        self._events = EventBuffer()
        self._reasoning = _ReasoningReader(markers, self._events, opened=opened, separates=separates)
        self._calls = _CallReader(syntax, names, self._events) if names else None
        self._read: Callable[..., None] = self._calls.read if self._calls else self._content

    def push(self, *pieces: tuple[str, str]) -> list[Event]:
        """The events that are certain now that these texts have come, each with who drafted it."""
        for text, source in pieces:
            for character in text:
                self._read(*self._reasoning.read((character, source)))
        return self._events.take()

    def end(self) -> list[Event]:
        """The events of what was held back, when no text will follow."""
        self._read(*self._reasoning.end())
        if self._calls is not None:
            self._calls.end()
        return self._events.take()

    def _content(self, *characters: Character) -> None:
        self._events.content(characters)


class _ReasoningReader:
    """Splits the reasoning at the beginning of an answer from what follows.

    `opened` says that the prompt ends inside it; an opener is then passed over. `separates` False leaves
    it where it is: content, with its markers. White space next to a marker belongs to the marker.
    """

    def __init__(
        self, markers: ReasoningMarkers, events: EventBuffer, *, opened: bool, separates: bool
    ) -> None:
        self._markers = markers
        self._events = events
        self._opened = opened
        self._separates = separates
        self._expected: tuple[str, ...] = markers if opened else (markers.opener,)
        self._state: Literal["before", "inside", "after"] = "before"
        self._held: list[Character] = []
        """blanks, and what may be the beginning of a marker"""
        self._skips_blanks = separates
        """whether blanks here belong to the marker before them"""

    def read(self, character: Character) -> Iterator[Character]:
        """The characters of the answer that are known now that this one has come."""
        if self._state == "after":
            self._skips_blanks = self._skips_blanks and character[0] in BLANKS
            if not self._skips_blanks:
                yield character
            return
        self._held.append(character)
        text = _joined(self._held).lstrip(BLANKS)
        if text in self._expected:
            if text == self._markers.opener:
                self._enter()
            else:
                self._state, self._skips_blanks = "after", self._separates
            if not self._separates:
                self._events.content(self._held)
            self._held = []
        elif not any(marker.startswith(text) for marker in self._expected):
            held, self._held = self._held, []
            if self._state == "before" and not self._opened:
                self._state, self._skips_blanks = "after", False
                yield from held
                return
            self._enter()
            known = len(held) - len(text) + 1  # the first that is no blank belongs to no marker
            self._emit(held[known - 1 : known] if self._skips_blanks else held[:known])
            for again in held[known:]:
                yield from self.read(again)

    def end(self) -> list[Character]:
        """What of the answer was held back."""
        held, self._held = self._held, []
        if self._state == "inside" or self._opened:
            self._emit(held)
            return []
        return held

    def _enter(self) -> None:
        self._state, self._expected = "inside", (self._markers.closer,)

    def _emit(self, characters: list[Character]) -> None:
        self._skips_blanks = False
        self._events.add(ReasoningDelta if self._separates else ContentDelta, characters)


def _joined(characters: Iterable[Character]) -> str:
    return "".join(text for text, _ in characters)


@dataclass(slots=True)
class _CallReader:
    """Finds calls as their text comes in, character by character; fulfils `scan.Sink`.

    A call is certain with its name and the first character of its arguments. White space around calls
    belongs to them, unless there is content on both sides.
    """

    syntax: CallSyntax
    names: Collection[str]
    events: EventBuffer
    is_after_call: bool = False
    _source: str = ""
    _scan: Generator[None, str, None] | None = None
    _scanned_calls: int = 0
    """those that the scan has begun"""
    _held: list[Character] = field(default_factory=list)
    """what the scan has read and is not certain of"""
    _blanks: list[Character] = field(default_factory=list)
    _num_kept_blanks: int = 0
    """those before a call"""
    _line_start: bool = True
    _has_content: bool = False
    _is_last_call: bool = False
    """whether no content has followed a call"""
    _num_calls: int = 0
    _name: str = ""
    _early: list[Character] = field(default_factory=list)
    """arguments that came before the name"""
    _is_open: bool = False
    """whether a call has begun and not ended"""

    def read(self, *characters: Character) -> None:
        """The next characters of the answer."""
        queue = deque(characters)
        while queue:
            character = queue.popleft()
            self._source = character[1]
            if self._scan is not None:
                self._held.append(character)
                try:
                    expect(len(self._held) <= _MAX_HELD)
                    self._scan.send(character[0])
                except StopIteration:
                    self._scan = None
                except Refused:
                    queue.extendleft(reversed(self._give_up()))
            elif self.syntax.begins(character[0], line_start=self._line_start):
                self._scan = self.syntax.scan(character[0], self, self.names)
                self._scanned_calls = 0
                self._held.append(character)
                next(self._scan)
            else:
                self._write(character)

    def end(self) -> None:
        """The answer is over."""
        while self._scan is not None and not self._is_open:
            is_over = self.is_after_call and self._is_last_call
            if is_over and self.syntax.closer.startswith(_joined(self._held)):
                break
            self.read(*self._give_up())
        if not self._is_last_call:
            self.events.content(self._blanks)

    # What a scan finds

    def name(self, name: str) -> None:
        expect(bool(name) and not self._is_open and not self._name)
        self._name = name
        if self._early:
            self._begin_call()
            self.events.add(ToolArgumentsDelta, self._early, self._num_calls - 1)
            self._early = []

    def arguments(self, text: str) -> None:
        if not self._name:
            self._early.append((text, self._source))
            return
        if not self._is_open:
            self._begin_call()
        self._held.clear()
        self.events.add(ToolArgumentsDelta, [(text, self._source)], self._num_calls - 1)

    def close(self) -> None:
        if not self._is_open:
            expect(bool(self._name))
            self.arguments("{}")
        self._is_open, self._name, self.is_after_call = False, "", True
        self._held.clear()

    def drop(self) -> None:
        self._held.clear()
        self.is_after_call = False
        del self._blanks[self._num_kept_blanks :]

    def _begin_call(self) -> None:
        self.events.add(_started, [(self._name, "")], self._num_calls)
        self._num_calls += 1
        self._scanned_calls += 1
        self._is_open = self._is_last_call = True
        self._line_start = False
        self._held.clear()
        if not self._has_content:
            self._blanks.clear()
        self._num_kept_blanks = len(self._blanks)

    def _give_up(self) -> list[Character]:
        """What the scan was not certain of, to be read as something else."""
        held, self._held, self._early, self._scan = self._held, [], [], None
        self.is_after_call = self.is_after_call or self._is_open
        self._is_open, self._name = False, ""
        if held and not self._scanned_calls:
            self._write(held.pop(0))
        return held

    def _write(self, character: Character) -> None:
        """A character of the content."""
        if character[0] in BLANKS:
            self._blanks.append(character)
            self._line_start = self._line_start or character[0] == "\n"
            return
        if self._has_content or not self._num_calls:
            self.events.content(self._blanks)
        self._blanks.clear()
        self._num_kept_blanks = 0
        self.events.content([character])
        self._line_start, self._has_content, self._is_last_call = False, True, False


def _started(index: int, name: str, _source: str) -> ToolCallStart:
    return ToolCallStart(index, name)
