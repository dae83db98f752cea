"""Files that are written as a whole or not at all, and JSON that is read back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write to `path`: all of it or, with SettingError, nothing; what was there stays until then. A text is
    written as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe, which must stay what it is
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        reason = f"the {what} could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, and where it is nested too deeply to be
    read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
