"""Ctrl-C: the first one ends a generation after the current step, the second one at once."""

from __future__ import annotations

import signal
import sys
from _thread import interrupt_main
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import Any, Self

_MOMENT_S = 0.05


class Interrupt:
    """While active, the first SIGINT sets `requested` instead of raising KeyboardInterrupt, so that the step
    can finish and its text be shown."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if current_thread() is main_thread():  # no other one gets signals
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


class LoadInterrupt(Interrupt):
    """While active, SIGINT raises KeyboardInterrupt as usual; where Python would print and ignore it (in a
    callback from native code, or while an object is freed), it is raised a moment later."""

    def __init__(self) -> None:
        super().__init__()
        self._later: Timer | None = None

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._forgotten
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        sys.unraisablehook = self._hook
        if self._later is not None:
            self._later.cancel()
            self._later.join()
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _forgotten(self, lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            self._hook(lost)
            return
        self.requested = True
        self._later = Timer(_MOMENT_S, interrupt_main)
        self._later.start()
