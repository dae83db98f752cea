"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.core.errors import SettingError


def check_writable(path: Path, what: str) -> None:
    """Raise SettingError where `what` could not be written to `path` in the end."""
    if path.is_dir():
        raise SettingError(str(path), "it is a folder", f"Name a file for the {what}.")
    if not path.absolute().parent.is_dir():
        raise SettingError(str(path), "its folder does not exist", "Create it, or name another file.")
    # A file is replaced as a whole, which its folder must allow; a device or a pipe is written to.
    needed = [path] if path.exists() else []
    if not needed or path.is_file():
        needed.append(path.resolve().parent)
    if not all(os.access(place, os.W_OK) for place in needed):
        raise SettingError(str(path), "it cannot be written", "Check its permissions, or name another file.")


def write_whole(path: Path, text: str, what: str) -> None:
    """Write `text` to `path`: all of it or, with SettingError, nothing; what was there stays until then."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a device or a pipe, which must stay what it is
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        reason = f"the {what} could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
