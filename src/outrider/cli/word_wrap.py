"""Answers in a terminal: lines break between words, as the text comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from rich.cells import cell_len

Styled: TypeAlias = tuple[str, str]
"""Text and its style."""

_FENCES = ("```", "~~~")
_FIXED = (" ", "\t", "|", "{", "[")
"""Lines that begin so are code, tables or JSON, which another break would change."""


class WordWrap:
    """Breaks lines at the last blank that fits. A word is held back until it is whole."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._line = ""
        self._column = 0
        self._gap: list[Styled] = []
        self._word: list[Styled] = []
        self._in_fence = False
        self._out: list[Styled] = []

    def feed(self, pieces: Iterable[Styled]) -> list[Styled]:
        """What of the text so far can be shown now."""
        for text, style in pieces:
            for character in text:
                self._take(character, style)
        shown, self._out = self._out, []
        return shown

    def end(self) -> list[Styled]:
        """What is left; the next text begins a line."""
        self._place()
        self._show(self._gap)
        self._line, self._column, self._gap, self._in_fence = "", 0, [], False
        return self.feed(())

    def _take(self, character: str, style: str) -> None:
        if character == "\n":
            self._place()
            self._show([*self._gap, ("\n", style)])
            self._in_fence ^= self._line.startswith(_FENCES)
            self._line, self._column, self._gap = "", 0, []
            return
        self._line += character
        if self._in_fence or self._line.startswith((*_FIXED, *_FENCES)):
            self._place()
            self._show([*self._gap, (character, style)])
            self._gap = []
        elif character in " \t":
            self._place()
            self._gap.append((character, style))
        else:
            self._word.append((character, style))
            if cell_len(character) > 1 or self._columns(self._word) >= self._width():
                self._place()  # a line may break between such characters, and in a longer word

    def _place(self) -> None:
        """Show the word, on the next line in place of blanks before it where it does not fit on this one."""
        if not self._word:
            return
        needed = self._columns(self._gap) + self._columns(self._word)
        if self._gap and self._column + needed > self._width():
            self._show([("\n", "")])
            self._gap, self._column, needed = [], 0, self._columns(self._word)
        self._show([*self._gap, *self._word])
        self._column = (self._column + needed - 1) % self._width() + 1
        self._gap, self._word = [], []

    def _show(self, pieces: Iterable[Styled]) -> None:
        for text, style in pieces:
            if self._out and self._out[-1][1] == style:
                text = self._out.pop()[0] + text
            self._out.append((text, style))

    @staticmethod
    def _columns(pieces: Iterable[Styled]) -> int:
        return sum(cell_len(text) for text, _ in pieces)
