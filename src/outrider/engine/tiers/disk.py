"""The tier on disk: files of one user's texts, private, written whole or not at all, never trusted unread.

A file is a mark of the format, the length of its head, the head (JSON), its tag, the data, and their tag. The
tags are HMAC-SHA-256 under a secret that lies beside the files. What was made for another model, library or
load options (the `identity` of a disk) has another tag, and so does what anybody changed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Extent, SavedState
from outrider.core.errors import SettingError
from outrider.core.files import PARTIAL, parse_json, reason_of, write_private
from outrider.core.notices import notify

_log = logging.getLogger(__name__)

_SUFFIX = ".kv"
_MARK = b"outrider kv\n"
_VERSION = b"0001"
_KEY_BYTES = 32
_TAG_BYTES = 32
_MAX_HEAD_BYTES = 64 * 2**20
_HEAD_BYTES = 512
"""about what a head has besides its tokens"""
_ABANDONED_S = 3600.0
"""A partial file that nobody has written to for so long was left by a program that died."""

Tokens = npt.NDArray[np.int32]


class _Unusable(Exception):
    """A file that is not used; the message says why."""


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text and how much of it a copy holds; `scope` is the digest of its cache namespace."""

    scope: str
    tokens: Tokens
    extent: Extent

    @classmethod
    def of(cls, head: dict[str, Any]) -> SavedText:
        extent = Extent(head["length"], head["any_from"], tuple(head["checkpoints"]))
        return cls(head["scope"], np.array(head["tokens"], np.int32), extent)

    def head(self) -> dict[str, Any]:
        extent = self.extent
        return {
            "scope": self.scope,
            "length": extent.length,
            "any_from": extent.any_from,
            "checkpoints": extent.checkpoints,
            "tokens": self.tokens.tolist(),
        }


class Disk:
    """Texts in a folder, `max_bytes` at most, files of other models among them. Created where it does not
    exist; raises SettingError where it cannot be used."""

    def __init__(self, path: Path, identity: str, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._is_failing = False
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._secret = _secret_in(path)
        except OSError as error:
            way_out = "Name a folder that you can write to (--cache-dir)."
            raise SettingError(str(path), reason_of(error), way_out) from None
        self._identity = self.digest(identity)

    def digest(self, text: str) -> str:
        """A name for a text that says nothing about it to whoever lacks the secret."""
        return hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), "sha256").hex()

    def name_of(self, text: SavedText) -> str:
        return f"{self._identity[:16]}-{self.digest(text.scope + text.tokens.tobytes().hex())[:32]}"

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def found(self) -> Iterator[tuple[str, SavedText, int, int]]:
        """Name, text, bytes of the state and of the file for each text that is there, the one that was used
        longest ago first. Notices say what of the folder is not used; what a program that died has left is
        removed."""
        for path in self.path.glob(f"*{PARTIAL}"):
            with suppress(OSError):  # its program is at work
                if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()
        num_others = 0
        for _, size, path in self._files():
            if not path.name.startswith(self._identity[:16]):
                num_others += 1
                continue
            try:
                with _opened(path) as file:
                    head, _ = self._head(file)
                yield path.stem, SavedText.of(head), sum(head["sizes"]), size
            except (OSError, _Unusable) as error:
                notify(f"{path} is not used: {reason_of(error)}")
        if num_others:
            files = "1 file is" if num_others == 1 else f"{num_others} files are"
            notify(f"{self.path}: {files} of another model, library or setting, and not used")

    def read(self, name: str, text: SavedText) -> SavedState | None:
        """The state of a text; None, with a line in the log, where the file is of no use."""
        path = self._path(name)
        try:
            with _opened(path) as file:
                head, tag = self._head(file)
                if SavedText.of(head).head() != text.head():
                    raise _Unusable("it is of another text")
                data = np.empty(sum(head["sizes"]), np.uint8)
                if file.readinto(data.data) != data.nbytes:
                    raise _Unusable("it was cut short")
                body = hmac.new(self._secret, tag, sha256)
                body.update(data.data)
                if not hmac.compare_digest(body.digest(), file.read(_TAG_BYTES)):
                    raise _Unusable("its data was changed")
            return SavedState(text.extent, tuple(np.split(data, np.cumsum(head["sizes"])[:-1])))
        except FileNotFoundError:  # a server that shares the folder has made room
            return None
        except (OSError, _Unusable, MemoryError) as error:
            _log.warning("%s is not used: %s", path, reason_of(error))
            return None

    def make_room(self, text: SavedText, state: SavedState, spared: Collection[str]) -> set[str] | None:
        """Remove files until there is room for a text, those used longest ago first, but none whose name is
        `spared`; returns the names of those removed. None, and nothing is, where there can be no room."""
        needed = sum(part.nbytes for part in state.parts) + 12 * text.tokens.size + _HEAD_BYTES
        files, removed = list(self._files()), set[str]()
        total = needed + sum(size for _, size, _ in files)
        for _, size, path in files:
            if total > self._max_bytes and path.stem not in spared:
                removed.add(path.stem)
                total -= size
        if total > self._max_bytes:
            return None
        for name in removed:
            self.remove(name)
        return removed

    def write(self, name: str, text: SavedText, state: SavedState) -> int:
        """Write a text; returns the bytes of its file (0, with a line in the log, where that failed)."""
        sizes = [part.nbytes for part in state.parts]
        head = json.dumps({**text.head(), "sizes": sizes}, separators=(",", ":")).encode()
        front = _MARK + _VERSION + len(head).to_bytes(8, "little") + head
        tag = self._tag(front)
        body = hmac.new(self._secret, tag, sha256)
        for part in state.parts:
            body.update(part.data)
        try:
            write_private(self._path(name), [front, tag, *(part.data for part in state.parts), body.digest()])
        except OSError as error:
            if not self._is_failing:
                _log.warning("%s: KV is not written to disk: %s", self.path, reason_of(error))
            self._is_failing = True
            return 0
        self._is_failing = False
        return len(front) + sum(sizes) + 2 * _TAG_BYTES

    def remove(self, name: str) -> None:
        """Remove a text; harmless where it is gone."""
        with suppress(OSError):
            self._path(name).unlink()

    def used(self, name: str) -> None:
        with suppress(OSError):
            os.utime(self._path(name))

    def _path(self, name: str) -> Path:
        return self.path / f"{name}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When each file was used last, its bytes, and its path; the oldest first."""
        found = []
        for path in self.path.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # gone meanwhile
                status = path.lstat()
                found.append((status.st_mtime_ns, status.st_size, path))
        yield from sorted(found)

    def _tag(self, front: bytes) -> bytes:
        return hmac.digest(self._secret, self._identity.encode() + front, "sha256")

    def _head(self, file: Any) -> tuple[dict[str, Any], bytes]:
        """What a file says of itself, its data unread, and the tag; the file's size is right."""
        front = file.read(len(_MARK) + len(_VERSION) + 8)
        if not front.startswith(_MARK):
            raise _Unusable("it is of another kind")
        if front[len(_MARK) :][: len(_VERSION)] != _VERSION:
            raise _Unusable("another version wrote it")
        num_bytes = int.from_bytes(front[-8:], "little")
        if num_bytes > _MAX_HEAD_BYTES:
            raise _Unusable("its head was changed")
        text, tag = file.read(num_bytes), file.read(_TAG_BYTES)
        if not hmac.compare_digest(self._tag(front + text), tag):
            raise _Unusable("it is of another model, library or setting, or was changed")
        head: dict[str, Any] = parse_json(text)  # our own, from here on
        if os.fstat(file.fileno()).st_size != file.tell() + sum(head["sizes"]) + _TAG_BYTES:
            raise _Unusable("it was cut short")
        return head, tag


def _opened(path: Path) -> Any:
    """A regular file, open for reading; nothing that could keep a reader waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _Unusable("it is not a regular file")
    return open(handle, "rb")


def _secret_in(folder: Path) -> bytes:
    """The folder's secret, made where there is none. Raises OSError."""
    path = folder / "secret"
    with (
        suppress(FileExistsError),
        open(path, "xb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file,
    ):
        file.write(token_bytes(_KEY_BYTES))
    with path.open("rb") as file:
        secret = file.read(_KEY_BYTES + 1)
    if len(secret) != _KEY_BYTES:
        raise OSError("its file 'secret' is damaged: remove it")
    return secret
