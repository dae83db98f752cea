"""Text on its way to the terminal: nothing in it steers the terminal, and no write fails silently."""

from __future__ import annotations

import sys

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
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or "it cannot be written").lower()
        raise SettingError("standard output", reason, "Free some space, or send it elsewhere.") from error
