"""The log of the native libraries: silent unless asked for, its errors kept for messages."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
"""(level, text, user data) of a `ggml_log_callback`."""

ERROR_LEVEL = 4
"""ggml's level of errors: those below are for debugging, information and warnings"""

_FUNCTION = re.compile(r"^[\w:~]+: ")
"""Log lines begin with the name of the function that writes them."""

_recent_errors: deque[str] = deque(maxlen=20)
_shown = False


def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", errors="replace")
    if level == ERROR_LEVEL and line.strip():
        _recent_errors.append(_FUNCTION.sub("", line.strip()))
    if _shown:
        sys.stderr.write(line)
        sys.stderr.flush()


# Libraries keep the pointer: the callback must live as long as the process.
log_callback = LOG_CALLBACK(_on_log)


def show_log(shown: bool) -> None:
    """Let the libraries' own log through to standard error, or hold it back (the default)."""
    global _shown
    _shown = shown


def log_line(line: str) -> None:
    """A detail of ours, shown where the libraries' own are."""
    if _shown:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def clear_log() -> None:
    """Forget the errors logged so far, so that `last_error` speaks of what comes next."""
    _recent_errors.clear()


def last_error(default: str) -> str:
    """The first error that was logged since `clear_log`: what follows only passes it on."""
    return _recent_errors[0].rstrip(".") if _recent_errors else default


def speaks_of_memory(reason: str) -> bool:
    """Whether an error is about memory that could not be had."""
    return "alloc" in reason or "memory" in reason


@contextmanager
def silenced() -> Iterator[None]:
    """Keep off the terminal what a library writes to standard error past its log (ik_llama.cpp's reader of
    files does). What other threads write meanwhile is lost as well, so it is for loading alone."""
    with ExitStack() as stack:
        with suppress(OSError):  # it is closed: there is nothing to keep clean
            if not _shown:
                kept = os.dup(2)
                stack.callback(os.close, kept)
                stack.callback(os.dup2, kept, 2)
                sys.stderr.flush()
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 2)
        yield
