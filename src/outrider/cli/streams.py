"""The standard streams, whatever the shell did to them."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast

__all__ = ["USAGE_ERROR", "leave", "open_streams"]

USAGE_ERROR = 2
"""Exit status after what cannot be done as it was asked for."""


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
