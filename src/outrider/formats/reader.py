"""An answer split into content, reasoning and tool calls while it is being written, character by character.

Text is held back only as long as it may turn out to be something else than content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
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
        self._pieces: list[tuple[type[Event], int, str, str]] = []

    def content(self, texts: Iterable[Character]) -> None:
        """Text of the answer, with its sources."""
        self._add(ContentDelta, 0, texts)

    def reasoning(self, texts: Iterable[Character]) -> None:
        """Text before the answer, with its sources."""
        self._add(ReasoningDelta, 0, texts)

    def start(self, index: int, name: str) -> None:
        """A call begins."""
        self._add(ToolCallStart, index, [(name, "")])

    def arguments(self, index: int, texts: Iterable[Character]) -> None:
        """Text of its arguments, with its sources."""
        self._add(ToolArgumentsDelta, index, texts)

    def take(self) -> list[Event]:
        """All events so far, which are forgotten."""
        pieces, self._pieces = self._pieces, []
        joined = groupby(pieces, key=lambda piece: piece[:3])
        return [
            _event(kind, index, source, "".join(text for *_, text in group))
            for (kind, index, source), group in joined
        ]

    def _add(self, kind: type[Event], index: int, texts: Iterable[Character]) -> None:
        self._pieces += ((kind, index, source, text) for text, source in texts)


def _event(kind: type[Event], index: int, source: str, text: str) -> Event:
    if kind is ToolCallStart:
        return ToolCallStart(index, text)
    if kind is ToolArgumentsDelta:
        return ToolArgumentsDelta(index, text, source)
    return ContentDelta(text, source) if kind is ContentDelta else ReasoningDelta(text, source)


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
        self._is_fresh = True

    def push(self, *pieces: tuple[str, str]) -> list[Event]:
        """The events that are certain now that these texts have come, each with who drafted it."""
        for text, source in pieces:
            for character in text:
                for known in self._reasoning.read((character, source)):
                    self._read_answer(known)
        return self._events.take()

    def end(self) -> list[Event]:
        """The events of what was held back, when no text will follow."""
        for character in self._reasoning.end():
            self._read_answer(character)
        if self._calls is not None:
            self._calls.end()
        return self._events.take()

    def _read_answer(self, character: Character) -> None:
        if self._is_fresh and self._reasoning.found and character[0] in BLANKS:
            return
        self._is_fresh = False
        if self._calls is None:
            self._events.content([character])
        else:
            self._calls.read(character)


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
        self._state: Literal["before", "inside", "after"] = "before"
        self._blanks: list[Character] = []
        self._partial: list[Character] = []
        """what may be the beginning of a marker"""
        self._is_fresh = True
        """whether no reasoning was emitted"""
        self.found = False
        """whether there was reasoning that was split off"""

    def read(self, character: Character) -> Iterator[Character]:
        """The characters of the answer that are known now that this one has come."""
        if self._state == "after":
            yield character
        elif self._may_be_marker(character):
            self._partial.append(character)
            self._pass_marker()
        elif self._partial:
            first, *following = self._partial
            self._partial = []
            yield from self._read_text(first)
            for held in (*following, character):
                yield from self.read(held)
        elif character[0] in BLANKS:
            self._blanks.append(character)
        else:
            yield from self._read_text(character)

    def end(self) -> list[Character]:
        """What of the answer was held back."""
        held, self._blanks, self._partial = [*self._blanks, *self._partial], [], []
        if self._state == "inside" or self._opened:
            self._emit(held)
            return []
        return held

    def _expected(self) -> tuple[str, ...]:
        if self._state == "inside":
            return (self._markers.closer,)
        return self._markers if self._opened else (self._markers.opener,)

    def _may_be_marker(self, character: Character) -> bool:
        so_far = _joined(self._partial) + character[0]
        return any(marker.startswith(so_far) for marker in self._expected())

    def _pass_marker(self) -> None:
        marker = _joined(self._partial)
        if marker not in self._expected():
            return
        self._state = "inside" if marker == self._markers.opener else "after"
        self.found = self._separates
        if not self._separates:
            self._events.content((*self._blanks, *self._partial))
        self._blanks, self._partial = [], []

    def _read_text(self, character: Character) -> Iterator[Character]:
        """A character that is neither blank nor the beginning of a marker."""
        blanks, self._blanks = self._blanks, []
        if self._state == "before" and not self._opened:
            self._state = "after"
            yield from (*blanks, character)
            return
        self._state = "inside"
        self._emit([character] if self._is_fresh and self._separates else [*blanks, character])

    def _emit(self, characters: list[Character]) -> None:
        self._is_fresh = False
        (self._events.reasoning if self._separates else self._events.content)(characters)


def _joined(characters: Iterable[Character]) -> str:
    return "".join(text for text, _ in characters)


class _CallReader:
    """Finds calls as their text comes in, character by character; fulfils `scan.Sink`.

    A call is certain with its name and the first character of its arguments. White space around calls
    belongs to them, unless there is content on both sides.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], events: EventBuffer) -> None:
        self._syntax = syntax
        self._names = names
        self._events = events
        self._queue: deque[Character] = deque()
        self._source = ""
        self._scan: Generator[None, str, None] | None = None
        self._held: list[Character] = []
        """what the scan has read and is not certain of"""
        self._blanks: list[Character] = []
        self._num_kept_blanks = 0
        """those that stood before a call"""
        self._line_start = True
        self._has_content = False
        self._is_last_call = False
        """whether no content has followed a call"""
        self._num_calls = 0
        self._num_before_scan = 0
        self._name = ""
        self._early: list[Character] = []
        """arguments that came before the name"""
        self._is_open = False
        """whether a call has begun and not ended"""
        self.is_after_call = False

    def read(self, character: Character) -> None:
        """The next character of the answer."""
        self._queue.append(character)
        self._work()

    def end(self) -> None:
        """The answer is over."""
        while self._scan is not None and not (self._is_open or self._is_in_closer()):
            self._give_up()
            self._work()
        if not self._is_last_call:
            self._events.content(self._blanks)

    # What a scan finds

    def name(self, name: str) -> None:
        expect(bool(name) and not self._is_open and not self._name)
        self._name = name
        if self._early:
            self._begin_call()
            self._events.arguments(self._num_calls - 1, self._early)
            self._early = []

    def arguments(self, text: str) -> None:
        if not self._name:
            self._early.append((text, self._source))
            return
        if not self._is_open:
            self._begin_call()
        self._held.clear()
        self._events.arguments(self._num_calls - 1, [(text, self._source)])

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

    def _is_in_closer(self) -> bool:
        return (
            self.is_after_call and self._is_last_call and self._syntax.closer.startswith(_joined(self._held))
        )

    def _begin_call(self) -> None:
        self._events.start(self._num_calls, self._name)
        self._num_calls += 1
        self._is_open = self._is_last_call = True
        self._line_start = False
        self._held.clear()
        if not self._has_content:
            self._blanks.clear()
        self._num_kept_blanks = len(self._blanks)

    # Characters

    def _work(self) -> None:
        while self._queue:
            character = self._queue.popleft()
            self._source = character[1]
            if self._scan is not None:
                self._continue_scan(self._scan, character)
            elif self._syntax.begins(character[0], line_start=self._line_start):
                self._scan = self._syntax.scan(character[0], self, self._names)
                self._num_before_scan = self._num_calls
                self._held.append(character)
                next(self._scan)
            else:
                self._write(character)

    def _continue_scan(self, scan: Generator[None, str, None], character: Character) -> None:
        self._held.append(character)
        try:
            expect(len(self._held) <= _MAX_HELD)
            scan.send(character[0])
        except StopIteration:
            self._scan = None
        except Refused:
            self._give_up()

    def _give_up(self) -> None:
        """Read what the scan was not certain of as something else."""
        held, self._held, self._early, self._scan = self._held, [], [], None
        self.is_after_call = self.is_after_call or self._is_open
        self._is_open, self._name = False, ""
        if held and self._num_calls == self._num_before_scan:
            self._write(held.pop(0))
        self._queue.extendleft(reversed(held))

    def _write(self, character: Character) -> None:
        """A character of the content."""
        if character[0] in BLANKS:
            self._blanks.append(character)
            self._line_start = self._line_start or character[0] == "\n"
            return
        if self._has_content or not self._num_calls:
            self._events.content(self._blanks)
        self._blanks.clear()
        self._num_kept_blanks = 0
        self._events.content([character])
        self._line_start, self._has_content, self._is_last_call = False, True, False
