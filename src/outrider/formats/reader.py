"""An answer as it comes in, told apart into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Collection

from outrider.formats.calls import CallReader, CallSyntax
from outrider.formats.data import Event
from outrider.formats.events import Character, Events
from outrider.formats.scan import BLANKS
from outrider.formats.thought import ThoughtMarkers, ThoughtReader


class Reader:
    """One answer, read as it is written, in bits of any size: the events that come of them, joined, are
    the same.

    Calls are looked for if there are `names` of tools. `separates` says whether reasoning is told apart; if
    not, it is content like the rest, in which no call is looked for. `opened` says that the prompt ends
    inside the reasoning. What turns out to be no call is content, and a call that breaks off keeps what
    has come of it. White space next to a marker belongs to it, unless text stands on both sides.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        names: Collection[str],
        markers: ThoughtMarkers,
        *,
        separates: bool,
        opened: bool,
    ) -> None:
        self._events = Events()
        self._thought = ThoughtReader(markers, self._events, opened=opened, separates=separates)
        self._calls = CallReader(syntax, names, self._events) if names else None
        self._is_fresh = True

    def push(self, text: str, source: str) -> list[Event]:
        """The events that are certain now that this text has come; `source` is who drafted it."""
        for character in text:
            for known in self._thought.read((character, source)):
                self._answer(known)
        return self._events.take()

    def end(self) -> list[Event]:
        """The events of what was held back, when no text will follow."""
        for character in self._thought.end():
            self._answer(character)
        if self._calls is not None:
            self._calls.end()
        return self._events.take()

    def _answer(self, character: Character) -> None:
        if self._is_fresh and self._thought.found and character[0] in BLANKS:
            return
        self._is_fresh = False
        if self._calls is None:
            self._events.content([character])
        else:
            self._calls.read(character)
