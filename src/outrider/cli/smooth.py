"""`--smooth`: a step's text is shown while the next one computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from time import perf_counter
from types import TracebackType
from typing import Self

from outrider.core.data import Piece
from outrider.session.pacing import Pacer
from outrider.session.readout import Emission

_LAST_PATIENCE_S = 0.2
"""How long the end of the program waits for text that nobody takes, after a second Ctrl-C."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
