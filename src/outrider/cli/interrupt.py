"""Ctrl-C: the first one asks for an end after the current step, the second one ends at once."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any, Self

LOG_MODULE = "outrider.backends.gguf.library"
"""Where llama.cpp's log calls back into Python."""


class Interrupt:
    """While active, notes the first SIGINT in `requested` instead of raising KeyboardInterrupt.

    A step is never torn apart by it, so what was generated can be shown and counted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if current_thread() is main_thread():  # no other one gets signals
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class LoadInterrupt(Interrupt):
    """While active, SIGINT raises KeyboardInterrupt as usual, except while llama.cpp is writing to
    its log: an exception there is printed and forgotten, so it is raised at the end instead.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals.get("__name__") == LOG_MODULE:
                self.requested = True
                return
            frame = frame.f_back
        raise KeyboardInterrupt
