"""Events as they arise, neighbours of one kind joined."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.formats.data import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)

Character = tuple[str, str]
"""A character and who drafted it."""


class Events:
    """What was found since it was last taken."""

    def __init__(self) -> None:
        self._heads: list[tuple[type[Event], int, str]] = []
        self._texts: list[list[str]] = []

    def content(self, characters: Iterable[Character]) -> None:
        """Text of the answer."""
        for text, source in characters:
            self._add(ContentDelta, 0, source, text)

    def reasoning(self, characters: Iterable[Character]) -> None:
        """Text in front of the answer."""
        for text, source in characters:
            self._add(ReasoningDelta, 0, source, text)

    def start(self, index: int, name: str) -> None:
        """A call begins."""
        self._heads.append((ToolCallStart, index, ""))
        self._texts.append([name])

    def arguments(self, index: int, characters: Iterable[Character]) -> None:
        """Text of its arguments."""
        for text, source in characters:
            self._add(ToolArgumentsDelta, index, source, text)

    def take(self) -> list[Event]:
        """All events so far, which are forgotten."""
        events = [_event(*head, "".join(text)) for head, text in zip(self._heads, self._texts, strict=True)]
        self._heads, self._texts = [], []
        return events

    def _add(self, kind: type[Event], index: int, source: str, text: str) -> None:
        head = (kind, index, source)
        if self._heads and self._heads[-1] == head:
            self._texts[-1].append(text)
        else:
            self._heads.append(head)
            self._texts.append([text])


def _event(kind: type[Event], index: int, source: str, text: str) -> Event:
    if kind is ToolCallStart:
        return ToolCallStart(index, text)
    if kind is ToolArgumentsDelta:
        return ToolArgumentsDelta(index, text, source)
    return ContentDelta(text, source) if kind is ContentDelta else ReasoningDelta(text, source)
