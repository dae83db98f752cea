"""A generation's text on its way to standard output as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Thread
from time import perf_counter
from typing import Self

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.cli.interrupt import Interrupt
from outrider.cli.output import readable, write, write_past_buffer
from outrider.cli.report import SOURCE_STYLES, print_legend
from outrider.cli.settings import RunSettings
from outrider.core.data import Completion, Piece, StepRecord
from outrider.core.errors import ConstraintError
from outrider.session.generation import Generation
from outrider.session.pacing import Pacer
from outrider.session.readout import Emission, Readout, read_out

_SHORT_S = 1.0
"""A prompt that is read faster is not mentioned."""


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
    """Run a generation to its end or to Ctrl-C, and print the text as it comes, or at a pace.

    Where a constrained output cannot go on, what was produced is shown, and ConstraintError is raised.
    """
    emitted: list[Emission] = []
    paced = PacedPrinter(printer.print, printer.pacer) if printer and printer.pacer else None
    try:
        with Interrupt() as interrupt, Reading(printer) as reading, paced or nullcontext(printer) as out:
            for update in generation:
                reading.note(update.record)
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


class Reading:
    """While active, says in a terminal how much of a long prompt was read, until the first token."""

    def __init__(self, printer: TokenPrinter | None) -> None:
        self._status = printer.errors.status("") if printer and printer.errors.is_terminal else None
        self._start_s = perf_counter()
        self._num_read = 0

    def note(self, record: StepRecord) -> None:
        """Take a step into account, before its text is shown."""
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
    """Writes text to standard output as it comes, coloured by source where that is wanted.

    `pacer` is set where it is to be written at a pace, which `show` does.
    """

    def __init__(self, settings: RunSettings, errors: Console) -> None:
        self.errors = errors
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


# `--smooth`: a step's text is shown while the next one computes.

_LAST_PATIENCE_S = 0.2
"""How long the end of the program waits for text that is not read, after a second Ctrl-C."""


class PacedPrinter:
    """While active, shows pieces at the pacer's times, from a thread of its own.

    `print` returns at once: the engine goes on, and is at most two steps ahead of a terminal or pipe
    that takes no more. What showing raises, the next `print` raises, or leaving. Leaving shows what
    is left at once and waits for that, except after a second Ctrl-C. `emitted` is what was shown
    and when (seconds of `time.perf_counter`).
    """

    def __init__(self, show: Callable[[tuple[Piece, ...]], None], pacer: Pacer) -> None:
        self.emitted: list[Emission] = []
        self._show = show
        self._pacer = pacer
        self._texts: Queue[tuple[float, Sequence[Piece]] | None] = Queue(maxsize=1)
        self._error: Exception | None = None
        self._ended = False
        self._thread = Thread(target=self._run, name="outrider-smooth", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def print(self, pieces: Sequence[Piece]) -> None:
        """Take the text of one step. Raises what showing earlier text has raised."""
        self._texts.put((perf_counter(), pieces))
        if self._error is not None:
            raise self._error

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        patience_s = _LAST_PATIENCE_S if kind is KeyboardInterrupt else None
        with suppress(Full):
            self._texts.put(None, timeout=patience_s)
        self._thread.join(patience_s)
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._pace()
        except Exception as error:
            self._error = error
        while not self._ended:  # a full queue would hold up the engine
            self._take(None)

    def _pace(self) -> None:
        while not self._ended:
            next_s = self._pacer.next_s
            with suppress(Empty):
                if text := self._take(None if next_s is None else max(next_s - perf_counter(), 0)):
                    self._pacer.push(*text)
            self._emit(self._pacer.flush() if self._ended else self._pacer.due(perf_counter()))

    def _take(self, timeout_s: float | None) -> tuple[float, Sequence[Piece]] | None:
        """The next text; None, and `_ended`, when none will follow. Raises Empty when it takes longer."""
        text = self._texts.get(timeout=timeout_s)
        self._ended = text is None
        return text

    def _emit(self, pieces: tuple[Piece, ...]) -> None:
        if pieces:
            self._show(pieces)
            self.emitted.append(Emission(perf_counter(), sum(len(piece.text) for piece in pieces)))
