"""Ctrl-C between steps: what a step changes, it changes whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block a first Ctrl-C is noted, and KeyboardInterrupt is raised at its end; a second one is
    raised at once.

    Only the main thread gets it; and where the program handles the signal itself, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_noted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_noted
        if is_noted:
            raise KeyboardInterrupt
        is_noted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_noted:
            raise KeyboardInterrupt
