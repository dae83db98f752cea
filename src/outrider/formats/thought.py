"""The reasoning that stands in front of an answer, between two markers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outrider.formats.events import Character, Events
from outrider.formats.scan import BLANKS


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """How reasoning begins and ends."""

    opener: str
    closer: str


class ThoughtReader:
    """Tells the reasoning at the beginning of an answer from the rest.

    `opened` says that the prompt ends inside it; an opener is then passed over. `separates` False leaves
    it where it is: content, with its markers. White space next to a marker belongs to the marker.
    """

    def __init__(self, markers: ThoughtMarkers, events: Events, *, opened: bool, separates: bool) -> None:
        self._markers = markers
        self._events = events
        self._opened = opened
        self._separates = separates
        self._state: Literal["before", "inside", "behind"] = "before"
        self._blanks: list[Character] = []
        self._partial: list[Character] = []
        """what may be the beginning of a marker"""
        self._is_fresh = True
        """whether nothing has been said"""
        self.found = False
        """whether there was reasoning that was told apart"""

    def read(self, character: Character) -> Iterator[Character]:
        """The characters of the answer that are known now that this one has come."""
        if self._state == "behind":
            yield character
        elif self._may_be_marker(character):
            self._partial.append(character)
            self._pass_marker()
        elif self._partial:
            first, *rest = self._partial
            self._partial = []
            yield from self._read_text(first)
            for held in (*rest, character):
                yield from self.read(held)
        elif character[0] in BLANKS:
            self._blanks.append(character)
        else:
            yield from self._read_text(character)

    def end(self) -> list[Character]:
        """What of the answer was held back."""
        held, self._blanks, self._partial = [*self._blanks, *self._partial], [], []
        if self._state == "inside" or self._opened:
            self._say(held)
            return []
        return held

    def _expected(self) -> tuple[str, ...]:
        if self._state == "inside":
            return (self._markers.closer,)
        return (self._markers.opener, self._markers.closer) if self._opened else (self._markers.opener,)

    def _may_be_marker(self, character: Character) -> bool:
        so_far = "".join(text for text, _ in self._partial) + character[0]
        return any(marker.startswith(so_far) for marker in self._expected())

    def _pass_marker(self) -> None:
        marker = "".join(text for text, _ in self._partial)
        if marker not in self._expected():
            return
        self._state = "inside" if marker == self._markers.opener else "behind"
        self.found = self._separates
        if not self._separates:
            self._events.content((*self._blanks, *self._partial))
        self._blanks, self._partial = [], []

    def _read_text(self, character: Character) -> Iterator[Character]:
        """A character that is neither blank nor the beginning of a marker."""
        blanks, self._blanks = self._blanks, []
        if self._state == "before" and not self._opened:
            self._state = "behind"
            yield from (*blanks, character)
            return
        self._state = "inside"
        self._say([character] if self._is_fresh and self._separates else [*blanks, character])

    def _say(self, characters: list[Character]) -> None:
        self._is_fresh = False
        if self._separates:
            self._events.reasoning(characters)
        else:
            self._events.content(characters)
