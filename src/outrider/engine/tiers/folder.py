"""Files of one user's KV and texts: private, written whole or not at all, and never trusted unread.

A file is a mark of the format, the length of its head, the head (JSON), its tag, the data, and their tag. The
tags are HMAC-SHA-256 under a secret that lies beside the files. What was made for another model, library or
load options (the `identity` of a folder) has another tag, and so does what anybody changed.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from typing import Any

import numpy as np

from outrider.core.errors import SettingError
from outrider.core.files import PARTIAL, parse_json, reason_of, write_private
from outrider.core.saved import Bytes

_log = logging.getLogger(__name__)

_MARK = b"outrider kv\n"
_VERSION = b"0001"
_SECRET = "secret"
_KEY_BYTES = 32
_TAG_BYTES = 32
_MAX_HEAD_BYTES = 64 * 2**20
_ABANDONED_S = 3600.0
"""A partial file that nobody has written to for so long was left by a program that died."""


class Unusable(Exception):
    """A file that is not used; the message says why."""


class Folder:
    """A folder of such files. Created where it does not exist; raises SettingError where it cannot be used,
    which names the setting `flag`."""

    def __init__(self, path: Path, identity: str, flag: str) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._secret = _secret_in(path)
        except OSError as error:
            why = reason_of(error)
            raise SettingError(str(path), why, f"Name a folder that you can write to ({flag}).") from None
        self._identity = self.digest(identity)

    def digest(self, text: str) -> str:
        """A name for a text that says nothing about it to whoever lacks the secret."""
        return hmac.digest(self._secret, text.encode("utf-8", "surrogatepass"), "sha256").hex()

    def name_of(self, *facts: str) -> str:
        """The name of a file of these facts, for this model."""
        return f"{self._identity[:16]}-{self.digest(json.dumps(facts))[:32]}"

    def names(self, suffix: str) -> tuple[list[Path], int]:
        """The files of this model, and how many there are of others. What a program that died has left is
        removed."""
        own, num_others = [], 0
        for path in sorted(self.path.glob(f"*{suffix}")):
            own += [path] if path.name.startswith(self._identity[:16]) else []
            num_others += not path.name.startswith(self._identity[:16])
        for path in self.path.glob(f"*{PARTIAL}"):
            try:
                if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()
            except OSError:  # its program is at work
                continue
        return own, num_others

    def write(self, path: Path, head: Mapping[str, Any], parts: Sequence[Bytes] = ()) -> int:
        """Write a file, all of it or nothing; returns its bytes. Raises OSError."""
        sizes = [part.nbytes for part in parts]
        text = json.dumps({**head, "sizes": sizes}, separators=(",", ":")).encode()
        front = _MARK + _VERSION + len(text).to_bytes(8, "little") + text
        tag = self._tag(front)
        body = hmac.new(self._secret, tag, sha256)
        for part in parts:
            body.update(part.data)
        write_private(path, [front, tag, *(part.data for part in parts), body.digest()])
        return len(front) + sum(sizes) + 2 * _TAG_BYTES

    def read_head(self, path: Path) -> dict[str, Any]:
        """What a file says of itself, its data unread; its size is right. Raises Unusable, and OSError."""
        with _opened(path) as file:
            return self._head(file)[0]

    def read(self, path: Path) -> tuple[dict[str, Any], list[Bytes]]:
        """All of a file. Raises Unusable, and OSError."""
        with _opened(path) as file:
            head, tag = self._head(file)
            data = np.empty(sum(head["sizes"]), np.uint8)
            if file.readinto(data.data) != data.nbytes:
                raise Unusable("it was cut short")
            body = hmac.new(self._secret, tag, sha256)
            body.update(data.data)
            if not hmac.compare_digest(body.digest(), file.read(_TAG_BYTES)):
                raise Unusable("its data was changed")
        return head, list(_split(data, head["sizes"]))

    def _tag(self, front: bytes) -> bytes:
        return hmac.digest(self._secret, self._identity.encode() + front, "sha256")

    def _head(self, file: Any) -> tuple[dict[str, Any], bytes]:
        front = file.read(len(_MARK) + len(_VERSION) + 8)
        if not front.startswith(_MARK):
            raise Unusable("it is not a KV file")
        if front[len(_MARK) :][: len(_VERSION)] != _VERSION:
            raise Unusable("another version wrote it")
        num_bytes = int.from_bytes(front[-8:], "little")
        if num_bytes > _MAX_HEAD_BYTES:
            raise Unusable("its head was changed")
        text, tag = file.read(num_bytes), file.read(_TAG_BYTES)
        if not hmac.compare_digest(self._tag(front + text), tag):
            raise Unusable("it is of another model, library or setting, or was changed")
        head: dict[str, Any] = parse_json(text)  # our own, from here on
        if os.fstat(file.fileno()).st_size != file.tell() + sum(head["sizes"]) + _TAG_BYTES:
            raise Unusable("it was cut short")
        return head, tag


def _opened(path: Path) -> Any:
    """A regular file, open for reading; nothing that could keep a reader waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unusable("it is not a regular file")
    return open(handle, "rb")


def _split(data: Bytes, sizes: Sequence[int]) -> Iterator[Bytes]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _secret_in(folder: Path) -> bytes:
    """The folder's secret, made where there is none. Raises OSError."""
    path = folder / _SECRET
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with open(handle, "wb") as file:
            file.write(token_bytes(_KEY_BYTES))
    with path.open("rb") as file:
        secret = file.read(_KEY_BYTES + 1)
    if len(secret) != _KEY_BYTES:
        raise OSError(f"its file {_SECRET!r} is damaged: remove it")
    return secret


# Earlier texts that outlive a process, a file for each cache namespace.

_TEXTS_SUFFIX = ".texts"

Part = tuple[Sequence[int], Sequence[int]]
"""Tokens, and what names the blocks of the text that ends in them."""


class RememberedTexts:
    """Texts in a folder. What cannot be read or written is a line in the log."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def recall(self, scope: str) -> list[Part]:
        """The texts of a namespace, the oldest first."""
        path = self._path(scope)
        try:
            head = self._folder.read_head(path)
            if head["scope"] != self._folder.digest(scope):
                raise Unusable("it is of another namespace")
            return [(tokens, keys) for tokens, keys in head["texts"]]
        except FileNotFoundError:
            return []
        except (OSError, Unusable, KeyError, TypeError, ValueError) as error:
            _log.warning("%s is not used: %s", path, reason_of(error))
            return []

    def keep(self, scope: str, texts: Sequence[Part]) -> None:
        """Write the texts of a namespace, in place of those that were there."""
        try:
            self._folder.write(self._path(scope), {"scope": self._folder.digest(scope), "texts": list(texts)})
        except OSError as error:
            _log.warning("%s: earlier texts are not kept: %s", self._folder.path, reason_of(error))

    def forget(self) -> None:
        """Remove the texts of all namespaces."""
        for path in self._folder.names(_TEXTS_SUFFIX)[0]:
            with suppress(OSError):
                path.unlink()

    def _path(self, scope: str) -> Path:
        return self._folder.path / f"{self._folder.name_of('texts', scope)}{_TEXTS_SUFFIX}"
