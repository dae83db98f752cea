"""The standard streams, usable whatever the shell did to them. No write fails silently."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO, cast

from outrider.core.errors import SettingError
from outrider.core.files import reason_of

INTERRUPTED = 130
"""exit status after Ctrl-C, as in shells"""

PIPE_CLOSED = 141
"""exit status after the reader of standard output left, as in shells"""

INCOMPLETE = 3
"""exit status after an answer that was cut off before its schema or grammar ends"""

USAGE_ERROR = 2
"""exit status after an error that the user can fix"""


def write(text: str) -> None:
    """Write to standard output at once. Raises SettingError when it takes no more (a full disk)."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write a value as one line of JSON."""
    write(json.dumps(value) + "\n")


class _Stream:
    """A standard stream, for rich too. The program ends when the reader has left; a result that
    cannot be written is an error, a message is lost."""

    def __init__(self, stream: TextIO, *, has_results: bool) -> None:
        self._stream = stream
        self._has_results = has_results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:  # by Python's status, 1, some commands say what they found
            leave(PIPE_CLOSED)
        except OSError as error:
            if self._has_results:
                way_out = "Free some space, or send it elsewhere."
                raise SettingError("standard output", reason_of(error), way_out) from error


def _null(mode: str) -> TextIO:
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def open_streams() -> None:
    """Make the standard streams usable."""
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
    if not isinstance(sys.stdout, _Stream):
        sys.stdout = cast(TextIO, _Stream(sys.stdout, has_results=True))
        sys.stderr = cast(TextIO, _Stream(sys.stderr, has_results=False))


def leave(status: int) -> NoReturn:
    """Exit; what the standard streams no longer take is dropped."""
    for stream in (sys.stdout, sys.stderr):
        try:
            (stream._stream if isinstance(stream, _Stream) else stream).flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)
