"""Texts whose KV has left a model, in memory and on disk.

On disk they are files of one user's texts, private, written whole or not at all, never trusted unread. A
file is a mark of the format, the length of its head, the head (JSON), its tag, the data, and their tag. The
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
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Extent, SavedState, SavingModel
from outrider.core.errors import BackendError, SettingError
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

_MAX_WAITING = 2
"""Copies that wait to be written: where the disk is slower than texts come, some are not written."""
_MIN_TOKENS = 64
"""Fewer are read again."""

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
        """Remove files, those used longest ago first, until there is room for a text, but none of `spared`;
        returns their names. None, and nothing is removed, where there can be no room."""
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


# In memory and on disk

Reading = Future[SavedState | None]
"""What a thread reads from a file (None where it is of no use). As long as this is held the copy stays at
hand, and nothing removes its file."""


def _by_tier() -> dict[str, int]:
    return {"memory": 0, "disk": 0}


@dataclass(slots=True)
class TierCounts:
    """What became of texts: by tier ("memory", "disk") how often one was restored, and what is there."""

    hits: dict[str, int] = field(default_factory=_by_tier)
    restored_tokens: dict[str, int] = field(default_factory=_by_tier)
    num_bytes: dict[str, int] = field(default_factory=_by_tier)
    misses: int = 0
    """requests that found nothing to restore"""
    kept: int = 0
    not_written: int = 0
    refused: int = 0
    """files and copies that turned out to be of no use"""


@dataclass(slots=True, eq=False)
class _Entry:
    """A text that is kept: in memory (`state`), on disk (`num_disk_bytes`), or both."""

    text: SavedText
    num_bytes: int
    name: str
    state: SavedState | None = None
    num_disk_bytes: int = 0
    writing: Future[None] | None = None
    """what writes it, or is about to"""
    reading_ref: ref[Reading] | None = None
    used_s: float = field(default_factory=monotonic)

    @property
    def reading(self) -> Reading | None:
        """What reads it from disk; None where nobody wants that."""
        return self.reading_ref() if self.reading_ref is not None else None

    @property
    def is_at_hand(self) -> bool:
        """Whether it can be restored without waiting."""
        return self.state is not None or ((reading := self.reading) is not None and reading.done())

    def covers(self, tokens: Tokens) -> bool:
        """Whether a sequence that gets it can be cut to just these tokens."""
        size = tokens.size
        return self.text.extent.reach(size) == size and bool((self.text.tokens[:size] == tokens).all())


class _Found(NamedTuple):
    """A copy of a text: a sequence that gets it can go on from `num_tokens` of those that were asked for."""

    num_tokens: int
    entry: _Entry
    state: SavedState
    tier: str


class KvTiers:
    """Where texts go whose KV leaves a model, and come back from: `memory_bytes` in memory (0: none) and on
    `disk`, if any. Each cache namespace (`Request.scope`) finds its own alone. One thread calls all of it.

    What is kept goes to both. In each tier what was used longest ago makes room, but no file that is read for
    a request that is to begin. Files are written by a thread of their own and read by another; when the first
    does not keep up, some texts stay in memory alone.
    """

    def __init__(
        self,
        model: SavingModel,
        *,
        memory_bytes: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self.model = model
        self._memory_bytes = memory_bytes
        self.disk = disk
        self._counts = TierCounts()
        self._entries: list[_Entry] = []
        self._lock = Lock()
        self._reader = ThreadPoolExecutor(1, "kv reader")
        self._writer = ThreadPoolExecutor(1, "kv writer")
        self._closing_until_s: float | None = None
        for name, text, num_bytes, num_disk_bytes in disk.found() if disk is not None else ():
            self._entries.append(_Entry(text, num_bytes, name, None, num_disk_bytes))

    @property
    def counts(self) -> TierCounts:
        with self._lock:
            memory = sum(entry.num_bytes for entry in self._entries if entry.state is not None)
        disk = self.disk.num_bytes if self.disk else 0
        return replace(self._counts, num_bytes={"memory": memory, "disk": disk})

    def keep(self, sequence: int, scope: str, tokens: Sequence[int]) -> bool:
        """Copy what a sequence stores: the first of these tokens. False where the disk does not keep up, so
        that the copy is in memory alone."""
        held: Tokens = np.array(tokens[: self.model.length(sequence)], np.int32)
        same = next((entry for entry in self._of(scope) if entry.covers(held)), None)
        if same is not None:
            same.used_s = monotonic()
            return self._is_written(same)
        try:
            state = self.model.save(sequence)
        except (BackendError, MemoryError) as error:
            _log.warning("a text is not kept: %s", error or "there is no memory for it")
            return True
        text = SavedText(self._scope(scope), held, state.extent)
        name = self.disk.name_of(text) if self.disk else ""
        entry = _Entry(text, sum(part.nbytes for part in state.parts), name, state)
        self._counts.kept += 1
        is_written = self._is_written(entry, is_new=True)
        if self.disk is None:
            self._replace(entry)
        self._shrink_memory()
        return is_written

    def num_found(self, scope: str, tokens: Sequence[int], held: int, max_length: int) -> int:
        """How many of these tokens a request can go on from with what `find` gives; 0 for nothing."""
        best = self._best(scope, tokens, held, max_length)
        return 0 if best is None else best[1]

    def find(self, scope: str, tokens: Sequence[int], held: int, max_length: int) -> _Found | None:
        """The copy of `max_length` tokens at most that spares most tokens to a request which has the KV of
        `held` of these already; None where none is worth it."""
        while (best := self._best(scope, tokens, held, max_length)) is not None:
            entry, usable = best
            state, tier = entry.state, "memory"
            if state is None:
                reading = self._reading(entry)
                if reading is None:
                    continue
                state, tier = reading.result(), "disk"
            if state is not None:
                entry.used_s = monotonic()
                return _Found(usable, entry, state, tier)
            self._drop(entry)
        self._counts.misses += 1
        return None

    def read_ahead(
        self, scope: str, tokens: Sequence[int], held: int, max_length: int, when_done: Callable[[], None]
    ) -> Reading | None:
        """Begin to read what `find` would wait for; another thread calls `when_done` at the end. None where
        `find` would not wait."""
        best = self._best(scope, tokens, held, max_length)
        if best is None or best[0].is_at_hand:
            return None
        reading = self._reading(best[0])
        if reading is not None:
            reading.add_done_callback(lambda _: when_done())
        return reading

    def recall(self, scope: str) -> list[list[int]]:
        """All texts of a cache namespace, the oldest first."""
        return [entry.text.tokens.tolist() for entry in self._of(scope)]

    def texts(self, scope: str, tokens: Sequence[int]) -> list[list[int]]:
        """Those that begin with most of these tokens."""
        text: Tokens = np.array(tokens, np.int32)
        found = [entry.text.tokens for entry in self._of(scope)]
        equal = [_common(one, text) for one in found]
        longest = max(equal, default=0)
        return [one.tolist() for one, length in zip(found, equal, strict=True) if length == longest]

    def restore(self, found: _Found, sequence: int) -> bool:
        """Let an empty sequence hold all that was found. False where it turns out to be of no use; the
        sequence is empty then."""
        entry = found.entry
        try:
            self.model.restore(sequence, found.state)
        except BackendError as error:
            _log.warning("kept KV is not used: %s", error)
            self._drop(entry)
            return False
        if self.disk is not None and entry.num_disk_bytes:
            self.disk.used(entry.name)
        self._counts.hits[found.tier] += 1
        self._counts.restored_tokens[found.tier] += found.num_tokens
        if self._memory_bytes and entry.state is None:
            entry.state = found.state
            self._shrink_memory()
        return True

    def forget(self) -> None:
        with self._lock:
            for entry in self._entries:
                if entry.writing is not None:  # what has begun removes its file by itself
                    entry.writing.cancel()
                if self.disk is not None and entry.num_disk_bytes:
                    self.disk.remove(entry.name)
            self._entries.clear()

    # The index

    def _best(
        self, scope: str, tokens: Sequence[int], held: int, max_length: int
    ) -> tuple[_Entry, int] | None:
        """The copy that spares most tokens, one at hand before others, and how many can be used of it."""
        text: Tokens = np.array(tokens, np.int32)
        found = [
            (entry, entry.text.extent.reach(_common(entry.text.tokens, text)))
            for entry in self._of(scope)
            if entry.text.extent.length <= max_length
        ]
        best = max(found, key=lambda one: (one[1], one[0].is_at_hand), default=None)
        return best if best is not None and best[1] - held >= _MIN_TOKENS else None

    def _scope(self, scope: str) -> str:
        return self.disk.digest(scope) if self.disk else scope

    def _of(self, scope: str) -> list[_Entry]:
        scope = self._scope(scope)
        with self._lock:
            return [entry for entry in self._entries if entry.text.scope == scope]

    def _remove(self, entry: _Entry) -> None:
        if entry in self._entries:
            self._entries.remove(entry)

    def _drop(self, entry: _Entry) -> None:
        with self._lock:
            self._counts.refused += 1
            self._remove(entry)

    def _shrink_memory(self) -> None:
        """Let copies in memory go, those first that were used longest ago, until they are no more than may
        be. What is to be written stays until it is."""
        with self._lock:
            held = [e for e in self._entries if e.state is not None and e.writing is None]
            total = sum(entry.num_bytes for entry in held)
            for entry in sorted(held, key=lambda e: e.used_s):
                if total <= self._memory_bytes:
                    break
                total -= entry.num_bytes
                entry.state = None
                if not entry.num_disk_bytes:
                    self._remove(entry)

    # Reading and writing files

    def _reading(self, entry: _Entry) -> Reading | None:
        """What reads an entry: the file stays as long as it is held. None where the file has gone."""
        with self._lock:
            reading = entry.reading
            if reading is None and entry.num_disk_bytes:
                reading = self._reader.submit(self._read_file, entry)
                entry.reading_ref = ref(reading)
            return reading

    def _read_file(self, entry: _Entry) -> SavedState | None:
        assert self.disk is not None
        return self.disk.read(entry.name, entry.text)

    def _is_written(self, entry: _Entry, *, is_new: bool = False) -> bool:
        """See to it that an entry's file is there or will be, and that it is in the index if it `is_new`;
        False where too many wait for the disk."""
        needs_disk = self.disk is not None and not (entry.num_disk_bytes or entry.writing)
        may_write = needs_disk and self._may_write()
        with self._lock:
            if is_new:
                self._entries.append(entry)
            if may_write and entry.state is not None:  # under the same lock: else it may make room
                entry.writing = self._writer.submit(self._write, entry)
        return may_write or not needs_disk

    def _may_write(self) -> bool:
        """Whether one more copy may wait for the disk. Once `will_close` was called, wait until it may."""
        with self._lock:
            waiting = [e.writing for e in self._entries if e.writing is not None]
        if len(waiting) > _MAX_WAITING and self._closing_until_s is not None:
            timeout_s = max(self._closing_until_s - monotonic(), 0.0)
            waiting = list(wait(waiting, timeout_s, return_when=FIRST_COMPLETED).not_done)
        may_write = len(waiting) <= _MAX_WAITING
        with self._lock:
            self._counts.not_written += not may_write
        return may_write

    def _write(self, entry: _Entry) -> None:
        assert self.disk is not None and entry.state is not None
        with self._lock:
            spared = {other.name for other in self._entries if other.reading is not None}
            removed = self.disk.make_room(entry.text, entry.state, spared)
            for other in [e for e in self._entries if e.name in (removed or ()) and e is not entry]:
                other.num_disk_bytes = 0
                if other.state is None:
                    self._remove(other)
        size = 0 if removed is None else self.disk.write(entry.name, entry.text, entry.state)
        with self._lock:
            self._counts.not_written += not size
            entry.num_disk_bytes, entry.writing = size, None
            if entry not in self._entries:  # forgotten meanwhile
                self.disk.remove(entry.name)
                return
        self._replace(entry)
        self._shrink_memory()

    def _replace(self, entry: _Entry) -> None:
        """Forget the beginnings of an entry that it can give as well."""
        with self._lock:
            known = [e for e in self._entries if e is not entry and e.text.scope == entry.text.scope]
            for other in known:
                # A request may be about to begin with it.
                if other.reading is not None or not entry.covers(other.text.tokens):
                    continue
                self._entries.remove(other)
                if self.disk is not None and other.num_disk_bytes:
                    self.disk.remove(other.name)

    def will_close(self, until_s: float) -> None:
        """From now on what is kept waits for the disk, until that moment of `monotonic` at most."""
        self._closing_until_s = until_s

    def close(self) -> None:
        """Write what memory alone has, as far as the time of `will_close` allows, and end the threads."""
        self._closing_until_s = until_s = self._closing_until_s or 0.0
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self.disk is not None:
            with self._lock:
                alone = [e for e in self._entries if not (e.num_disk_bytes or e.writing) and e.state]
            for entry in sorted(alone, key=lambda e: -e.used_s):
                self._is_written(entry)
            with self._lock:
                waiting = [e.writing for e in self._entries if e.writing is not None]
            wait(waiting, max(until_s - monotonic(), 0.0))
        self._writer.shutdown(wait=False, cancel_futures=True)


def _common(one: Tokens, other: Tokens) -> int:
    size = min(one.size, other.size)
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
