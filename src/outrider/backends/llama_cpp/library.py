"""The native library: its identity, and its log, which stays silent unless asked for.

Everything else in this package takes the bindings from here, so that the log is caught before
the first line of it is written.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections import deque
from functools import cache
from pathlib import Path

# Where an assertion of the library fails, it would start a debugger and print its stack.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import llama_cpp
import llama_cpp.llama_cpp as lib

__all__ = ["build_id", "clear_log", "device_names", "last_error", "lib", "show_log"]

_ERROR_LEVEL = 4
"""ggml's level of errors: those below are for debugging, information and warnings"""

_FUNCTION = re.compile(r"^[\w:~]+: ")
"""Log lines begin with the name of the function that writes them."""

_recent_errors: deque[str] = deque(maxlen=20)
_shown = False


def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", errors="replace")
    if level == _ERROR_LEVEL and line.strip():
        _recent_errors.append(_FUNCTION.sub("", line.strip()))
    if _shown:
        sys.stderr.write(line)
        sys.stderr.flush()


# The library keeps the pointer: the callback must live as long as the module.
_log_callback = lib.llama_log_callback(_on_log)
lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
lib.llama_backend_init()


def show_log(shown: bool) -> None:
    """Let llama.cpp's own log through to standard error, or hold it back (the default)."""
    global _shown
    _shown = shown


def clear_log() -> None:
    """Forget the errors logged so far, so that `last_error` speaks of what comes next."""
    _recent_errors.clear()


def last_error(default: str) -> str:
    """The most telling error that llama.cpp logged since `clear_log`: the first of them, since
    what follows only passes it on."""
    return _recent_errors[0].rstrip(".") if _recent_errors else default


@cache
def build_id() -> str:
    """Names this build of the library: version and a hash of its binaries' sizes and dates."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(folder.iterdir()):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return f"llama-cpp-python {llama_cpp.__version__} {digest.hexdigest()}"


@cache
def device_names() -> tuple[str, ...]:
    """Processors and GPUs that the library can compute on, as it describes them; empty where it does
    not tell."""
    try:  # the bindings leave these functions out
        count, get, describe = (
            getattr(lib._lib, f"ggml_backend_dev_{name}") for name in ("count", "get", "description")
        )
    except AttributeError:
        return ()
    count.restype, get.restype, describe.restype = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    get.argtypes, describe.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    return tuple(describe(get(i)).decode(errors="replace") for i in range(count()))
