"""The standard streams, whatever the shell did to them, and text on its way to the terminal: nothing in it
steers the terminal, and no write fails silently."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from outrider.core.errors import SettingError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

USAGE_ERROR = 2
"""Exit status after what cannot be done as it was asked for."""

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


def write_json(value: Any) -> None:
    """Write a value as one line of JSON; raises what `write` does."""
    write(json.dumps(value) + "\n")


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


def _null(mode: str) -> TextIO:
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def open_streams() -> None:
    """Make the standard streams usable whatever the shell did to them."""
    if sys.stdin is None:
        sys.stdin = _null("r")
    if sys.stderr is None:
        sys.stderr = _null("w")
    if sys.stdout is None:
        sys.stderr.write("error: standard output: it is closed. Send it to a file, or to /dev/null.\n")
        sys.exit(USAGE_ERROR)
    # A terminal that lacks a character gets a question mark instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def leave(status: int) -> None:
    """Exit; what standard output cannot take any more is dropped without a word."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
