"""Streams a generation to standard output."""

from __future__ import annotations

from contextlib import ExitStack

from rich.color import ColorSystem
from rich.style import Style

from outrider.cli.interrupt import Interrupt
from outrider.cli.output import write
from outrider.cli.report import SOURCE_STYLES, print_legend
from outrider.cli.screen import Screen
from outrider.cli.settings import TextSettings
from outrider.core.data import Completion, Piece
from outrider.core.errors import ConstraintError
from outrider.core.numbers import readable
from outrider.session.generation import Generation


def show(generation: Generation, printer: TokenPrinter | None) -> Completion:
    """Run a generation to its end or Ctrl-C, and print the text as it comes. Raises ConstraintError for a
    constrained output that cannot continue, after printing its text."""
    try:
        with Interrupt() as interrupt, ExitStack() as reading:
            if printer and printer.errors.is_terminal:
                reading.enter_context(printer.errors.status("reading the prompt"))
            for update in generation:
                if update.record.kind == "decode":
                    reading.close()
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


class TokenPrinter:
    """Writes text to standard output as it comes, if asked for coloured by source."""

    def __init__(self, settings: TextSettings, errors: Screen) -> None:
        self.errors = errors
        self._console = Screen(soft_wrap=True)
        self._coloured = settings.show_source
        self._printed = 0
        if self._coloured and (self._console.no_color or not self._console.color_system):
            errors.note("--show-source needs a terminal with colours: none is used")
            self._coloured = False
        if self._coloured:
            print_legend(errors)

    def print(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            self._show(piece.text, SOURCE_STYLES.get(piece.source, "magenta"))
            self._printed += len(piece.text)

    def end(self, text: str) -> None:
        """Print the rest of the whole text, and end the line."""
        self._show(text[self._printed :] + "\n")
        self._printed = 0

    def _show(self, text: str, style: str = "") -> None:
        text = readable(text) if self._console.is_terminal else text
        if self._coloured and text:  # not through the console, which would turn tabs into spaces
            text = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
        write(text)
