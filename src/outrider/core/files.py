"""Files, read with errors that name them, and written whole or not at all."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError, OutriderError, SettingError
from outrider.core.numbers import counted, gigabytes


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


# The files of a folder, and their text.

MAX_FILE_BYTES = 200_000_000
"""a larger file is skipped: it is data, not text"""
MAX_FOLDER_BYTES = 300_000_000
"""more is refused: sorting it would take more than 4 GB of memory"""
_VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})
_CHUNK_BYTES = 1 << 18


@dataclass(slots=True)
class FileList:
    """Files in the order of their names, and how many were left out and why."""

    sizes: dict[Path, int] = field(default_factory=dict)
    """in bytes"""
    skipped: Counter[str] = field(default_factory=Counter)
    identity: str = ""
    """a hash that changes when a file comes, goes or changes"""

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def said(self) -> str:
        """What was skipped, in words; empty where nothing was."""
        return ", ".join(f"{count} {why}" for why, count in sorted((+self.skipped).items()))


def list_files(paths: Sequence[Path]) -> FileList:
    """The files at and below these paths.

    Links to folders are not followed and version control's own folders are left out; a file that is reached
    twice counts once. Raises SettingError for a path that does not exist, and for more than
    `MAX_FOLDER_BYTES` in all.
    """
    files, seen, digest = FileList(), set[tuple[int, int]](), sha256()
    for path in _walk(paths, files.skipped):
        try:
            found = path.stat()
        except OSError:
            files.skipped["unreadable"] += 1
            continue
        if (found.st_dev, found.st_ino) in seen:
            continue
        seen.add((found.st_dev, found.st_ino))
        if not stat.S_ISREG(found.st_mode):
            files.skipped["special"] += 1
        elif found.st_size > MAX_FILE_BYTES:
            files.skipped[f"over {MAX_FILE_BYTES // 1_000_000} MB"] += 1
        elif not os.access(path, os.R_OK):
            files.skipped["unreadable"] += 1
        else:
            files.sizes[path] = found.st_size
            digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="replace"))
    files.identity = digest.hexdigest()
    if files.size_bytes > MAX_FOLDER_BYTES:
        reason = f"{gigabytes(files.size_bytes)} of text in {counted(len(files.sizes), 'file')} is too much"
        way_out = f"Name the folders that matter; {gigabytes(MAX_FOLDER_BYTES)} is the most."
        raise SettingError(", ".join(map(str, paths)), reason, way_out)
    return files


def _walk(paths: Sequence[Path], skipped: Counter[str]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            why = "there is no such file or folder"
            raise SettingError(str(path), why, "Name what is to be looked up in.")
        if not path.is_dir():
            yield path
            continue
        for place, folders, names in os.walk(path, onerror=lambda _: skipped.update(["unreadable"])):
            folders[:] = sorted(set(folders) - _VERSION_CONTROL)
            skipped["linked"] += sum((Path(place) / name).is_symlink() for name in folders)
            yield from (Path(place) / name for name in sorted(names))


def chunks(path: Path) -> Iterator[str]:
    """A file's text in parts that end with a line, where lines are not too long; line ends are those
    of Unix.

    Raises OSError where it cannot be read, and UnicodeDecodeError where it is no UTF-8 text.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            data += file.readline(_CHUNK_BYTES)
            if b"\0" in data:
                raise UnicodeDecodeError("utf-8", data[:0], 0, 0, "it holds zero bytes")
            yield decoder.decode(data).replace("\r\n", "\n")
        yield decoder.decode(b"", final=True)
