"""An answer split into content, reasoning and tool calls while it is being written, character by character.

Text is held back only as long as it may turn out to be something else than content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from typing import Literal, Protocol

from outrider.formats.conversation import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReasoningMarkers,
    ToolArgumentsDelta,
    ToolCallStart,
    ToolSpec,
)
from outrider.formats.scan import BLANKS, Refused, Scan, expect, one_of

_MAX_HELD = 16_384
"""Characters that may wait for it to become certain that they are a call."""

Character = tuple[str, str]
"""A character and who drafted it."""


class EventBuffer:
    """Events since the last `take`; neighbours of one kind, call and source are joined."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Callable[..., Event], tuple[int, ...], str, str]] = []

    def start(self, index: int, name: str) -> None:
        """A call has begun."""
        self.add(_started, [(name, "")], index)

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


class AnswerReader(Protocol):
    """What splits an answer while it is being written."""

    def push(self, *pieces: Character) -> list[Event]:
        """The events that are certain now that these texts have come, each with who drafted it."""

    def end(self) -> list[Event]:
        """The events of what was held back, when no text will follow."""


@dataclass(slots=True)
class Reader:
    """One answer, read as it is written, in pieces of any size: the events that come of them, joined, are
    the same.

    Reasoning may come before the answer. `separates` says whether it is split off; if not, it is content like
    the rest, in which no call is looked for. `opened` says that the prompt ends inside it; an opener is then
    passed over. Calls are looked for if there are `tools`. A call is certain with its name and the
    first character of its arguments. What turns out to be no call is content, and a call that breaks off
    keeps what has come of it. White space next to markers and calls belongs to them, unless there is text on
    both sides.
    """

    scan_from: Callable[[str, Reader], Scan[None] | None]
    closers: tuple[str, ...]
    tools: Mapping[str, ToolSpec]
    markers: ReasoningMarkers
    separates: bool
    opened: InitVar[bool]
    is_after_call: bool = False
    _events: EventBuffer = field(default_factory=EventBuffer)
    _phase: Literal["before", "reasoning", "answer"] = "before"
    _expected: tuple[str, ...] = ()
    """markers of the reasoning that may come"""
    _source: str = ""
    _scan: Scan[None] | None = None
    _scanned_calls: int = 0
    """those that the scan has begun"""
    _held: list[Character] = field(default_factory=list)
    """what the scan has read and is not certain of"""
    _blanks: list[Character] = field(default_factory=list)
    _skips_blanks: bool = False
    """whether they belong to a marker of the reasoning before them"""
    _num_kept_blanks: int = 0
    """those before a call"""
    is_line_start: bool = True
    _has_content: bool = False
    _is_last_call: bool = False
    """whether no content has followed a call"""
    _num_calls: int = 0
    _name: str = ""
    _early: list[Character] = field(default_factory=list)
    """arguments that came before the name"""
    _is_open: bool = False
    """whether a call has begun and not ended"""

    def __post_init__(self, opened: bool) -> None:
        self._expected = self.markers[:1]
        if opened:
            self._phase, self._expected, self._skips_blanks = "reasoning", self.markers, self.separates

    def push(self, *pieces: Character) -> list[Event]:
        for text, source in pieces:
            self._read([(character, source) for character in text])
        return self._events.take()

    def end(self) -> list[Event]:
        self._skips_blanks = self._skips_blanks and self._phase == "answer"
        while self._scan is not None and not self._is_open:
            held = "".join(text for text, _ in self._held).strip()
            if self._is_last_call and any(closer.startswith(held) for closer in self.closers):
                break
            self._read(self._give_up())
        if not (self._is_last_call or self._skips_blanks):
            self._emit(self._blanks)
        return self._events.take()

    # What a scan finds

    def name(self, name: str) -> None:
        expect(bool(name) and not self._is_open and not self._name)
        self._name = name
        if self._early:
            self._begin_call()
            self._events.add(ToolArgumentsDelta, self._early, self._num_calls - 1)
            self._early = []

    def arguments(self, text: str) -> None:
        if not self._name:
            self._early.append((text, self._source))
            return
        if not self._is_open:
            self._begin_call()
        self._held.clear()
        self._events.add(ToolArgumentsDelta, [(text, self._source)], self._num_calls - 1)

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
        self._events.start(self._num_calls, self._name)
        self._num_calls += 1
        self._scanned_calls += 1
        self._is_open = self._is_last_call = True
        self.is_line_start = False
        self._held.clear()
        if not self._has_content:
            self._blanks.clear()
        self._num_kept_blanks = len(self._blanks)

    # Characters

    def _read(self, characters: Iterable[Character]) -> None:
        queue = deque(characters)
        while queue:
            character = queue.popleft()
            self._source = character[1]
            if self._scan is None:
                scan = self._scan_from(character[0])
                if scan is None:
                    self._write(character)
                    continue
                self._scan, self._scanned_calls = scan, 0
                self._held.append(character)
                next(scan)
                continue
            self._held.append(character)
            try:
                expect(len(self._held) <= _MAX_HELD)
                self._scan.send(character[0])
            except StopIteration:
                self._scan = None
            except Refused:
                queue.extendleft(reversed(self._give_up()))

    def _scan_from(self, first: str) -> Scan[None] | None:
        """What reads a marker or a call that may begin with this character."""
        if self._phase == "before" and first not in BLANKS + self.markers.opener[0]:
            self._phase = "answer"
        if self._phase != "answer":
            begun = [marker for marker in self._expected if marker.startswith(first)]
            return self._scan_marker(begun) if begun else None
        return self.scan_from(first, self) if self.tools else None

    def _scan_marker(self, begun: list[str]) -> Scan[None]:
        last = begun[0][-1]
        word = yield from one_of([marker[1:-1] for marker in begun], last)
        if not self.separates:
            self._events.add(ContentDelta, [*self._blanks, *self._held])
        self._held.clear()
        self._blanks.clear()
        self._phase = "reasoning" if self.markers.opener.endswith(word + last) else "answer"
        self._expected, self._skips_blanks = self.markers[1:], self.separates

    def _give_up(self) -> list[Character]:
        """What the scan was not certain of, to be read as something else."""
        held, self._held, self._early, self._scan = self._held, [], [], None
        self.is_after_call = self.is_after_call or self._is_open
        self._is_open, self._name = False, ""
        if self._phase == "before":
            self._phase = "answer"
        elif held and not self._scanned_calls:
            self._write(held.pop(0))
        return held

    def _write(self, character: Character) -> None:
        """A character of the reasoning or the content."""
        if character[0] in BLANKS and (self.tools or self._skips_blanks or self._phase != "answer"):
            self._blanks.append(character)
            self.is_line_start = self.is_line_start or character[0] == "\n"
            return
        if not self._skips_blanks and (self._has_content or not self._num_calls):
            self._emit(self._blanks)
        self._emit([character])
        self._blanks.clear()
        self._num_kept_blanks, self._skips_blanks = 0, False
        if self._phase == "reasoning":
            self._expected = self.markers[1:]
        else:
            self.is_line_start, self._has_content, self._is_last_call = False, True, False

    def _emit(self, characters: list[Character]) -> None:
        is_reasoning = self._phase == "reasoning" and self.separates
        self._events.add(ReasoningDelta if is_reasoning else ContentDelta, characters)


def _started(index: int, name: str, _source: str) -> ToolCallStart:
    return ToolCallStart(index, name)
