"""Files, read with errors that name them, and written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError, OutriderError, SettingError
from outrider.core.numbers import gigabytes


def reason_of(error: BaseException) -> str:
    """The reason that the system or a library gives, in lower case."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def read_text(path: Path, way_out: str, kind: type[InputError] = SettingError) -> str:
    """The text of a UTF-8 file. Raises `kind`, naming the file, if it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise kind(str(path), reason_of(error), way_out) from None
    return decoded(data, str(path), kind)


def decoded(data: bytes, name: str, kind: type[InputError]) -> str:
    """UTF-8 decoded, without a byte order mark. Raises `kind`, naming the input and the byte at fault."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x})"
        raise kind(name, why, "Convert it to UTF-8 first.") from error


def read_toml(path: Path, way_out: str) -> dict[str, Any]:
    """The content of a TOML file. Raises SettingError, naming the file."""
    try:
        return tomllib.loads(read_text(path, way_out))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingError(str(path), f"it is not valid TOML: {error}", "Correct it there.") from None


def check_writable(path: Path, what: str) -> None:
    """Raise SettingError if `what` could not be written to `path` later."""
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


def check_room(folder: Path, needed_bytes: float, error: Callable[[str], OutriderError]) -> None:
    """Raise `error`, given the reason, if the folder's disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise error(f"it needs {gigabytes(needed_bytes)}, and {folder} has {gigabytes(free)} free")


def write_whole(path: Path, content: str | bytes, what: str) -> None:
    """Write a file whole, text as UTF-8. Raises SettingError if that fails; the old file then stays."""
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe, which must stay what it is
        else:
            _replace(path.resolve(), [data], 0o666)
    except OSError as error:
        reason = f"the {what} could not be written ({reason_of(error)})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error


def write_private(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file that only its owner can read: whole or, with OSError, not at all."""
    _replace(path, parts, 0o600)


PARTIAL = ".partial"
"""The suffix of files that are being written."""


def _replace(path: Path, parts: Sequence[bytes | memoryview], mode: int) -> None:
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        partial.unlink(missing_ok=True)  # one that was left may be readable by others, or be a link
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while view:  # of large ones a call writes some 2 GiB
                    view = view[file.write(view) :]
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for one nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
