"""The tier on disk: a file for each text, no more bytes than may be, those used longest ago removed first."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.files import reason_of
from outrider.core.notices import notify
from outrider.core.saved import Extent, SavedState
from outrider.engine.tiers.folder import Folder, Unusable

_log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_HEAD_BYTES = 512
"""about what a head has besides its tokens"""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text and how much of it a copy holds; `scope` is the digest of its cache namespace."""

    scope: str
    tokens: Tokens
    extent: Extent

    @classmethod
    def of(cls, head: dict[str, Any]) -> SavedText:
        """What the head of a file says. Raises Unusable."""
        try:
            extent = Extent(head["length"], head["any_from"], tuple(head["checkpoints"]))
            return cls(head["scope"], np.array(head["tokens"], np.int32), extent)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise Unusable("it is of another kind") from None

    def head(self) -> dict[str, Any]:
        """The head of its file."""
        extent = self.extent
        return {
            "scope": self.scope,
            "length": extent.length,
            "any_from": extent.any_from,
            "checkpoints": extent.checkpoints,
            "tokens": self.tokens.tolist(),
        }


class Disk:
    """Texts in a folder, `max_bytes` at most, files of other models among them."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._is_failing = False

    def name_of(self, text: SavedText) -> str:
        return self.folder.name_of(text.scope, text.tokens.tobytes().hex())

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self._files())

    def found(self) -> Iterator[tuple[str, SavedText, int, int]]:
        """Name, text, bytes of the state and of the file for each text that is there, the one that was used
        longest ago first. Notices say what of the folder is not used."""
        own, num_others = self.folder.names(_SUFFIX)
        if num_others:
            files = "1 file is" if num_others == 1 else f"{num_others} files are"
            notify(f"{self.folder.path}: {files} of another model, library or setting, and not used")
        for _, size, path in self._files():
            if path not in own:
                continue
            try:
                head = self.folder.read_head(path)
                yield path.stem, SavedText.of(head), sum(head["sizes"]), size
            except (OSError, Unusable) as error:
                notify(f"{path} is not used: {_reason(error)}")

    def read(self, name: str, text: SavedText) -> SavedState | None:
        """The state of a text; None, with a line in the log, where the file is of no use."""
        path = self._path(name)
        try:
            head, parts = self.folder.read(path)
            if SavedText.of(head).head() != text.head():
                raise Unusable("it is of another text")
            return SavedState(text.extent, tuple(parts))
        except FileNotFoundError:  # a server that shares the folder has made room
            return None
        except (OSError, Unusable, MemoryError) as error:
            _log.warning("%s is not used: %s", path, _reason(error))
            return None

    def make_room(self, text: SavedText, state: SavedState, spared: Collection[str]) -> set[str] | None:
        """Remove files until there is room for a text, those used longest ago first, but none whose name is
        `spared`; returns the names of those removed. None, and nothing is, where there can be no room."""
        needed = sum(part.nbytes for part in state.parts) + 12 * text.tokens.size + _HEAD_BYTES
        files, removed = list(self._files()), list[Path]()
        total = needed + sum(size for _, size, _ in files)
        for _, size, path in files:
            if total > self._max_bytes and path.stem not in spared:
                removed.append(path)
                total -= size
        if total > self._max_bytes:
            return None
        for path in removed:
            self.remove(path.stem)
        return {path.stem for path in removed}

    def write(self, name: str, text: SavedText, state: SavedState) -> int:
        """Write a text; returns the bytes of its file (0, with a line in the log, where that failed)."""
        size = 0
        try:
            size = self.folder.write(self._path(name), text.head(), state.parts)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("%s: KV is not written to disk: %s", self.folder.path, _reason(error))
            self._is_failing = True
        return size

    def remove(self, name: str) -> None:
        """Remove a text; harmless where it is gone."""
        with suppress(OSError):
            self._path(name).unlink()

    def used(self, name: str) -> None:
        """A text was of use: it stays longer."""
        with suppress(OSError):
            os.utime(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder.path / f"{name}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When each file was used last, its bytes, and its path; the oldest first."""
        found = []
        for path in self.folder.path.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # gone meanwhile
                status = path.lstat()
                found.append((status.st_mtime_ns, status.st_size, path))
        yield from sorted(found)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, Unusable) else reason_of(error)
