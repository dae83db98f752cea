"""Streams a generation to standard output; in a terminal lines break between words, as the text comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Self, TypeAlias

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.style import Style

from outrider.cli.interrupt import Interrupt
from outrider.cli.output import readable, write
from outrider.cli.report import SOURCE_STYLES, print_legend
from outrider.cli.screen import Screen
from outrider.cli.settings import TextSettings
from outrider.core.data import Completion, Piece, StepRecord
from outrider.core.errors import ConstraintError
from outrider.session.generation import Generation

_SHORT_S = 1.0
"""A prompt that is read faster is not reported."""
Styled: TypeAlias = tuple[str, str]
"""Text and its style."""

_BLANKS = " \t"
_FENCES = ("```", "~~~")
_FIXED = (" ", "\t", "|", "{", "[")
"""Lines that begin so are code, tables or JSON, which another break would change."""


def show(generation: Generation, printer: TokenPrinter | None) -> Completion:
    """Run a generation to its end or Ctrl-C, and print the text as it comes. Raises ConstraintError for a
    constrained output that cannot continue, after printing its text."""
    try:
        with Interrupt() as interrupt, Reading(printer) as reading:
            for update in generation:
                reading.note(update.record)
                if printer:
                    printer.print(update.pieces)
                if interrupt.requested:
                    generation.cancel()
            completion = generation.completion
    except ConstraintError as error:
        if printer:
            printer.end(error.text)
        raise
    if printer:
        printer.end(completion.text)
    return completion


class Reading:
    """Shows in a terminal how much of a long prompt was read, until the first token."""

    def __init__(self, printer: TokenPrinter | None) -> None:
        self._status = printer.errors.status("") if printer and printer.errors.is_terminal else None
        self._start_s = perf_counter()
        self._num_read = 0

    def note(self, record: StepRecord) -> None:
        if self._status is None:
            return
        if record.kind == "decode":
            self._status.stop()
            self._status = None
            return
        self._num_read += record.num_evaluated
        if perf_counter() - self._start_s > _SHORT_S:
            self._status.update(f"reading the prompt: {self._num_read:,} tokens so far")
            self._status.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()


class TokenPrinter:
    """Writes text to standard output as it comes, if asked for coloured by source."""

    def __init__(self, settings: TextSettings, errors: Screen) -> None:
        self.errors = errors
        self._console = Screen(soft_wrap=True)
        self._coloured = settings.show_source
        self._printed = 0
        self._wrap = WordWrap(lambda: self._console.width) if self._console.is_terminal else None
        if self._coloured and (self._console.no_color or not self._console.color_system):
            errors.note("--show-source needs a terminal with colours: none is used")
            self._coloured = False
        if self._coloured:
            print_legend(errors)

    def print(self, pieces: tuple[Piece, ...]) -> None:
        self._show([(piece.text, SOURCE_STYLES.get(piece.source, "magenta")) for piece in pieces])
        self._printed += sum(len(piece.text) for piece in pieces)

    def end(self, text: str) -> None:
        """Print the rest of the whole text, and end the line."""
        self._show([(text[self._printed :], "")], is_end=True)
        write("\n")
        self._printed = 0

    def _show(self, pieces: list[Styled], *, is_end: bool = False) -> None:
        if self._wrap is not None:
            pieces = self._wrap.feed((readable(text), style) for text, style in pieces)
            pieces += self._wrap.end() if is_end else []
        if self._coloured:
            # Not through the console, which would turn tabs into spaces.
            pieces = [(_coloured(text, style), style) for text, style in pieces]
        write("".join(text for text, _ in pieces))


def _coloured(text: str, style: str) -> str:
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if text else text


class WordWrap:
    """Breaks lines at the last blank that fits. A word is held back until it is whole."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._line = ""
        self._column = 0
        self._held: list[Styled] = []
        """characters: blanks, then a word"""
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
        self._show_held()
        self._line, self._column, self._in_fence = "", 0, False
        return self.feed(())

    def _take(self, character: str, style: str) -> None:
        word = "".join(held for held, _ in self._held).strip(_BLANKS)
        is_blank = character in _BLANKS
        self._line += character
        if character == "\n":
            self._show_held()
            self._show([(character, style)])
            self._in_fence ^= self._line.startswith(_FENCES)
            self._line, self._column = "", 0
            return
        is_fixed = self._in_fence or self._line.startswith((*_FIXED, *_FENCES))
        if is_fixed or (is_blank and word):
            self._show_held()
        self._held.append((character, style))
        # A line may break between wide characters, and in a longer word.
        if is_fixed or (not is_blank and (cell_len(character) > 1 or cell_len(word) + 1 >= self._width())):
            self._show_held()

    def _show_held(self) -> None:
        """On the next line, without the blanks before it, where a word does not fit on this one."""
        text = "".join(held for held, _ in self._held)
        num_blanks, needed = len(text) - len(text.lstrip(_BLANKS)), cell_len(text)
        if 0 < num_blanks < len(text) and self._column + needed > self._width():
            self._show([("\n", "")])
            self._held, self._column, needed = self._held[num_blanks:], 0, cell_len(text[num_blanks:])
        self._show(self._held)
        self._column = (self._column + needed - 1) % self._width() + 1 if needed else self._column
        self._held = []

    def _show(self, pieces: Iterable[Styled]) -> None:
        for text, style in pieces:
            if self._out and self._out[-1][1] == style:
                text = self._out.pop()[0] + text
            self._out.append((text, style))
