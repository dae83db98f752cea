"""An index of a corpus as a file: written whole or not at all, mapped into memory to be read.

Layout: the laid out texts, the sorted places, a JSON footer, and the footer's length, a checksum of
all before it and the mark that ends every index of this version and byte order.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import calcsize, pack, unpack

import numpy as np

from outrider.core.errors import InputError, SettingError
from outrider.core.files import parse_json, reason_of
from outrider.core.numbers import counted, gigabytes
from outrider.drafters.suffix_array import BYTES, ContextIndex, Laid, Places
from outrider.models.hub import cache_dir

_MARK = f"outrider corpus 1 {sys.byteorder}".ljust(24).encode()
_TRAILER = "<QI24s"
_UNUSED_S = 30 * 24 * 3600.0
_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class About:
    """What an index was made of. `sources` and `tokenizer` must match for it to be used."""

    sources: str
    tokenizer: str
    num_files: int
    num_tokens: int
    skipped: dict[str, int]


class DamagedIndex(InputError):
    """An index file is not what was once written; `why` says what is wrong with it."""


def folder() -> Path:
    """Where indexes are kept, for this user alone. Raises SettingError where that cannot be."""
    place = cache_dir() / "corpus"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(0, "it belongs to another user")
        place.chmod(0o700)
    except OSError as error:
        raise SettingError(
            str(place),
            f"the corpus index cannot be kept there ({reason_of(error)})",
            "Set OUTRIDER_CACHE to a folder of your own.",
        ) from error
    return place


def save(path: Path, laid: Laid, places: Places, about: About) -> None:
    """Write an index. Of two processes that write the same one, the later wins; both are whole.

    Raises SettingError where it cannot be written.
    """
    footer = json.dumps(asdict(about) | {"num_stored": len(laid), "num_places": len(places)}).encode()
    parts = [laid.tobytes(), places.tobytes(), footer]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    trailer = pack(_TRAILER, len(footer), checksum, _MARK)
    try:
        handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:  # mkstemp: for the owner alone
                for part in (*parts, trailer):
                    file.write(part)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        reason = f"the corpus index could not be written ({reason_of(error)})"
        raise SettingError(
            str(path.parent), reason, "Free some space, or set OUTRIDER_CACHE to a larger disk."
        ) from error


def load(path: Path) -> tuple[ContextIndex, About]:
    """Map an index into memory, read through once to check that it is whole.

    Raises FileNotFoundError, and DamagedIndex for anything that `save` did not write.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid():
            raise DamagedIndex(str(path), "it belongs to another user", "Remove it.")
        if found.st_size < calcsize(_TRAILER):
            raise DamagedIndex(str(path), "it is too short", "Remove it.")
        stored = mmap(file.fileno(), 0, access=ACCESS_READ)
    end = len(stored) - calcsize(_TRAILER)
    footer_bytes, checksum, mark = unpack(_TRAILER, stored[end:])
    if mark != _MARK:
        raise DamagedIndex(str(path), "its last bytes are not those of an index", "Remove it.")
    if zlib.crc32(memoryview(stored)[:end]) != checksum:
        raise DamagedIndex(str(path), "its checksum is wrong", "Remove it.")
    about = parse_json(stored[end - footer_bytes : end])
    num_stored, num_places = about.pop("num_stored"), about.pop("num_places")
    places = np.frombuffer(stored, np.int32, num_places, offset=num_stored * BYTES)
    os.utime(path)  # used: not to be swept away
    return ContextIndex(stored, places), About(**about)


def sweep(place: Path) -> None:
    """Remove indexes that were not used for a month, and what interrupted processes left."""
    now = time.time()
    for path in place.iterdir():
        with suppress(OSError):
            age = now - path.stat().st_mtime
            if age > (_ABANDONED_S if path.suffix == ".partial" else _UNUSED_S):
                path.unlink()


# Which files a corpus consists of, and their text.

MAX_FILE_BYTES = 200_000_000
"""a larger file is skipped: it is data, not text that an answer repeats"""

MAX_CORPUS_BYTES = 300_000_000
"""a larger corpus is refused: sorting it would take more than 4 GB of memory"""

_VERSION_CONTROL = frozenset({".git", ".hg", ".svn"})
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Source:
    """A file and what shows that it is still the same."""

    path: Path
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class FileList:
    """The files of a corpus in the order of their names, and how many were left out and why."""

    sources: list[Source] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(source.size_bytes for source in self.sources)

    @property
    def identity(self) -> str:
        """A hash that changes when a file comes, goes or changes."""
        digest = sha256()
        for source in self.sources:
            digest.update(f"{source.path}\0{source.size_bytes}\0{source.mtime_ns}\0".encode(errors="replace"))
        return digest.hexdigest()

    def add(self, path: Path) -> None:
        """Take a file in, once, or count why not."""
        try:
            found = path.stat()
        except OSError:
            self.skipped["unreadable"] += 1
            return
        if (found.st_dev, found.st_ino) in self._seen:
            return
        self._seen.add((found.st_dev, found.st_ino))
        if not stat.S_ISREG(found.st_mode):
            self.skipped["special"] += 1
        elif found.st_size > MAX_FILE_BYTES:
            self.skipped[f"over {MAX_FILE_BYTES // 1_000_000} MB"] += 1
        elif not os.access(path, os.R_OK):
            self.skipped["unreadable"] += 1
        else:
            self.sources.append(Source(path, found.st_size, found.st_mtime_ns))


def list_files(paths: Sequence[Path]) -> FileList:
    """The files at and below these paths.

    Links to folders are not followed and version control's own folders are left out; a file that
    is reached twice counts once. Raises SettingError for a path that does not exist, and for more
    than `MAX_CORPUS_BYTES` in all.
    """
    files = FileList()
    for path in paths:
        if path.is_dir():
            _add_folder(files, path)
        elif path.exists():
            files.add(path)
        else:
            raise SettingError(
                str(path), "there is no such file or folder", "Name what is to be looked up in."
            )
    if files.size_bytes > MAX_CORPUS_BYTES:
        raise SettingError(
            ", ".join(map(str, paths)),
            f"{gigabytes(files.size_bytes)} of text in {counted(len(files.sources), 'file')} is too much",
            f"Name the folders that matter; {gigabytes(MAX_CORPUS_BYTES)} is the most.",
        )
    return files


def _add_folder(files: FileList, folder: Path) -> None:
    for place, folders, names in os.walk(folder, onerror=lambda _: files.skipped.update(["unreadable"])):
        folders[:] = sorted(set(folders) - _VERSION_CONTROL)
        if linked := sum((Path(place) / name).is_symlink() for name in folders):
            files.skipped["linked"] += linked
        for name in sorted(names):
            files.add(Path(place) / name)


def chunks(source: Source) -> Iterator[str]:
    """A file's text in parts that end with a line, where lines are not too long; line ends are those
    of Unix.

    Raises OSError where it cannot be read, and UnicodeDecodeError where it is no UTF-8 text.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with source.path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            data += file.readline(_CHUNK_BYTES)
            if b"\0" in data:
                raise UnicodeDecodeError("utf-8", data[:0], 0, 0, "it holds zero bytes")
            yield decoder.decode(data).replace("\r\n", "\n")
        yield decoder.decode(b"", final=True)
