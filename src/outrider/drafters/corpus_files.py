"""Which files a corpus consists of, and their text."""

from __future__ import annotations

import codecs
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from outrider.core.errors import SettingError

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
            f"{files.size_bytes / 1e6:.0f} MB in {len(files.sources)} files are too much to look up in",
            f"Name the folders that matter; {MAX_CORPUS_BYTES / 1e6:.0f} MB is the most.",
        )
    return files


def _add_folder(files: FileList, folder: Path) -> None:
    def count(_error: OSError) -> None:
        files.skipped["unreadable"] += 1

    for place, folders, names in os.walk(folder, onerror=count):
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
