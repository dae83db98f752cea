"""The tool calls of an answer, told from its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator
from typing import Protocol

from outrider.formats.events import Character, Events
from outrider.formats.scan import BLANKS, Refused, Scan, Sink, expect

_MAX_HELD = 16_384
"""Characters that may wait for it to become certain that they are a call."""


class CallSyntax(Protocol):
    """How a chat format writes calls."""

    closer: str
    """the marker behind a call, where there is one"""

    def begins(self, character: str, *, line_start: bool) -> bool:
        """Whether a call, or a marker of one, may begin with this character."""
        ...

    def scan(self, first: str, sink: Sink, names: Collection[str]) -> Scan[None]:
        """The rest of it, behind that character; `names` are those of the tools."""
        ...


class CallReader:
    """Finds calls as their text comes in, character by character; fulfils `scan.Sink`.

    Text is held back only while it may be the beginning of a call, which is certain with its name and
    the first character of its arguments. What turns out to be none is content. White space around
    calls belongs to them, unless content stands on both sides.
    """

    def __init__(self, syntax: CallSyntax, names: Collection[str], events: Events) -> None:
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
        self.is_behind_call = False

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

    # What a scan tells

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
        self._is_open, self._name, self.is_behind_call = False, "", True
        self._held.clear()

    def drop(self) -> None:
        self._held.clear()
        self.is_behind_call = False
        del self._blanks[self._num_kept_blanks :]

    def _is_in_closer(self) -> bool:
        held = "".join(text for text, _ in self._held)
        return self.is_behind_call and self._is_last_call and self._syntax.closer.startswith(held)

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
                self._go_on(character)
            elif self._syntax.begins(character[0], line_start=self._line_start):
                self._scan = self._syntax.scan(character[0], self, self._names)
                self._num_before_scan = self._num_calls
                self._held.append(character)
                next(self._scan)
            else:
                self._write(character)

    def _go_on(self, character: Character) -> None:
        assert self._scan is not None
        self._held.append(character)
        try:
            expect(len(self._held) <= _MAX_HELD)
            self._scan.send(character[0])
        except StopIteration:
            self._scan = None
        except Refused:
            self._give_up()

    def _give_up(self) -> None:
        """Read what the scan was not certain of as something else."""
        held, self._held, self._early, self._scan = self._held, [], [], None
        self.is_behind_call = self.is_behind_call or self._is_open
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
