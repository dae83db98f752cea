"""Text on its way to the terminal: nothing in it steers the terminal, and no write fails silently."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from outrider.core.errors import SettingError

# All but line breaks and tabs.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def readable(text: str) -> str:
    """The text without control characters: a model, a file name or a GGUF may hold any."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Write to standard output at once.

    Raises SettingError when it takes no more (a full disk), BrokenPipeError when its reader left.
    """
    _write(text, _through_the_buffer)


def write_past_buffer(text: str) -> None:
    """As `write`, for a thread that may be stuck in it when the program ends.

    Python's own buffer has a lock, which the end of the interpreter would wait for.
    """
    _write(text, _to_the_descriptor)


def _write(text: str, put: Callable[[str], None]) -> None:
    try:
        put(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or "it cannot be written").lower()
        raise SettingError("standard output", reason, "Free some space, or send it elsewhere.") from error


def _through_the_buffer(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _to_the_descriptor(text: str) -> None:
    data = text.encode(sys.stdout.encoding, sys.stdout.errors or "strict")
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]
