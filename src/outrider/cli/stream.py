"""A generation's text on its way to standard output as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.cli.interrupt import Interrupt
from outrider.cli.output import readable, write, write_past_buffer
from outrider.cli.report import SOURCE_STYLES, print_legend
from outrider.cli.settings import RunSettings
from outrider.cli.smooth import PacedPrinter
from outrider.core.data import Completion, Piece
from outrider.core.errors import ConstraintError
from outrider.session.generation import Generation
from outrider.session.pacing import Pacer
from outrider.session.readout import Emission, Readout, read_out


@dataclass(frozen=True, slots=True)
class Shown:
    """A finished generation, and when its characters were made visible: `paced` under --smooth."""

    completion: Completion
    emitted: Sequence[Emission]
    paced: Sequence[Emission] = ()

    def readout(self, plain_token_s: float | None = None) -> Readout:
        """Its counts and times; `plain_token_s` is a token's time under plain decoding, if known."""
        return read_out(self.completion, emitted=self.emitted, paced=self.paced, plain_token_s=plain_token_s)


def show(generation: Generation, printer: TokenPrinter | None) -> Shown:
    """Run a generation to its end or to Ctrl-C, printing the text as it comes, or paced.

    Where a constrained output cannot go on, what was produced is shown, and ConstraintError is raised.
    """
    emitted: list[Emission] = []
    paced = PacedPrinter(printer.print, printer.pacer) if printer and printer.pacer else None
    try:
        with Interrupt() as interrupt, paced or nullcontext(printer) as out:
            for update in generation:
                emitted.append(Emission(update.record.end_s, len(update.text)))
                if out:
                    out.print(update.pieces)
                if interrupt.requested:
                    generation.cancel()
            completion = generation.completion
    except ConstraintError as error:
        if printer:
            printer.end(error.text)
        raise
    if printer:
        printer.end(completion.text)
    return Shown(completion, emitted, paced.emitted if paced else ())


class TokenPrinter:
    """Writes text to standard output as it comes, coloured by source where that is wanted.

    `pacer` is there when it is to be written at a pace (`show` does it).
    """

    def __init__(self, settings: RunSettings, errors: Console) -> None:
        self._console = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
        self.pacer = Pacer() if settings.smooth else None
        self._write: Callable[[str], None] = write_past_buffer if self.pacer else write
        self._coloured = settings.show_source
        self._printed = 0
        if self._coloured and (self._console.no_color or not self._console.color_system):
            errors.print(
                Text("note: --show-source needs a terminal with colours: none is used", style="yellow")
            )
            self._coloured = False
        if self._coloured:
            print_legend(errors)

    def print(self, pieces: tuple[Piece, ...]) -> None:
        """Show the pieces of one step."""
        self._write(
            "".join(self._dressed(piece.text, SOURCE_STYLES.get(piece.source, "magenta")) for piece in pieces)
        )
        self._printed += sum(len(piece.text) for piece in pieces)

    def end(self, text: str) -> None:
        """Show what of the whole text was still held back, and end the line."""
        self._write(self._dressed(text[self._printed :], "") + "\n")
        self._printed = 0

    def _dressed(self, text: str, style: str) -> str:
        if self._console.is_terminal:
            text = readable(text)
        if self._coloured and text:
            # Not through the console, which would turn tabs into spaces.
            text = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
        return text
