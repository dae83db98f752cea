"""Texts whose KV has left a model, in memory and on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic, perf_counter
from typing import NamedTuple
from weakref import ref

import numpy as np

from outrider.core.contracts import SavedState, SavingModel
from outrider.core.errors import BackendError
from outrider.engine.tiers.disk import Disk, SavedText, Tokens

_log = logging.getLogger(__name__)

_MAX_WAITING = 2
"""Copies that wait to be written: where the disk is slower than texts come, some are not written."""
_DECAY = 0.9
"""weight of all earlier observations beside the last one"""

Reading = Future[tuple[SavedState | None, float]]
"""What a thread reads from a file (None where it is of no use), and the seconds that it took. As long as this
is held the copy stays at hand, and nothing removes its file."""


@dataclass(slots=True)
class _Rate:
    """Seconds of a unit, by what real calls took: the last ones weigh most."""

    units: float = 0.0
    seconds: float = 0.0

    def note(self, units: float, seconds: float) -> None:
        self.units = self.units * _DECAY + units
        self.seconds = self.seconds * _DECAY + seconds

    def of(self, units: float, unknown: float) -> float:
        """Seconds of so many units; so much a unit where nothing is known."""
        return units * (self.seconds / self.units if self.units else unknown)


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
    read_s: float


class KvTiers:
    """Where texts go whose KV leaves a model, and come back from: `memory_bytes` in memory (0: none) and on
    `disk`, if any. Each cache namespace (`Request.scope`) finds its own alone. One thread calls all of it.

    What is kept goes to both: memory is searched first, and files outlive the process. In each tier what was
    used longest ago makes room, but no file that is read for a request that is to begin. Files are written by
    a thread of their own and read by another; when the first does not keep up, some texts stay in memory
    alone. A copy is made and restored only where that takes less time than reading the text again, by what
    calls, copies and files took lately.
    """

    def __init__(
        self,
        model: SavingModel,
        *,
        memory_bytes: int = 0,
        disk: Disk | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.model = model
        self._clock = clock
        self._memory_bytes = memory_bytes
        self.disk = disk
        self._counts = TierCounts()
        self._entries: list[_Entry] = []
        self._lock = Lock()
        self._reads = _Rate()
        self._copies = {"memory": _Rate(), "disk": _Rate()}
        self._token_bytes = _Rate()
        self._reader = ThreadPoolExecutor(1, "kv reader")
        self._writer = ThreadPoolExecutor(1, "kv writer")
        self._closing_until_s: float | None = None
        self._is_closed = False
        for name, text, num_bytes, num_disk_bytes in disk.found() if disk is not None else ():
            self._entries.append(_Entry(text, num_bytes, name, None, num_disk_bytes))

    @property
    def counts(self) -> TierCounts:
        with self._lock:
            memory = sum(entry.num_bytes for entry in self._entries if entry.state is not None)
        disk = self.disk.num_bytes if self.disk else 0
        return replace(self._counts, num_bytes={"memory": memory, "disk": disk})

    def keep(self, sequence: int, scope: str, tokens: Sequence[int]) -> bool:
        """Copy what a sequence stores: the first of these tokens. Nothing is done where that cannot be, or to
        read them takes no longer than to restore them. False where the disk does not keep up, so that the
        copy is in memory alone."""
        held: Tokens = np.array(tokens[: self.model.length(sequence)], np.int32)
        same = next((entry for entry in self._of(scope) if entry.covers(held)), None)
        if same is not None:
            same.used_s = monotonic()
            return self._is_written(same)
        back_s = self._copies["memory" if self._memory_bytes else "disk"]
        if self._reads.of(held.size, 1.0) <= back_s.of(self._token_bytes.of(held.size, 0.0), 0.0):
            return True
        before = self._clock()
        try:
            state = self.model.save(sequence)
        except (BackendError, MemoryError) as error:
            _log.warning("a text is not kept: %s", error or "there is no memory for it")
            return True
        num_bytes = sum(part.nbytes for part in state.parts)
        self._token_bytes.note(held.size, num_bytes)
        if not self._copies["memory"].units:  # the way out is much like the way back
            self._copies["memory"].note(num_bytes, self._clock() - before)
        text = SavedText(self._scope(scope), held, state.extent)
        name = self.disk.name_of(text) if self.disk else ""
        entry = _Entry(text, num_bytes, name, state)
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
        """The copy of `max_length` tokens at most that spares most time to a request which has the KV of
        `held` of these tokens already; None where evaluating them takes no longer."""
        while (best := self._best(scope, tokens, held, max_length)) is not None:
            entry, usable = best
            state, tier, read_s = entry.state, "memory", 0.0
            if state is None:
                reading = self._reading(entry)
                if reading is None:
                    continue
                (state, read_s), tier = reading.result(), "disk"
            if state is not None:
                entry.used_s = monotonic()
                return _Found(usable, entry, state, tier, read_s)
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
        entry, before = found.entry, self._clock()
        try:
            self.model.restore(sequence, found.state)
        except BackendError as error:
            _log.warning("kept KV is not used: %s", error)
            self._drop(entry)
            return False
        self._copies[found.tier].note(entry.num_bytes, found.read_s + self._clock() - before)
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

    def note_read(self, num_tokens: int, seconds: float) -> None:
        """The model took so long to evaluate so many tokens of prompts."""
        self._reads.note(num_tokens, seconds)

    # What pays

    def _best(
        self, scope: str, tokens: Sequence[int], held: int, max_length: int
    ) -> tuple[_Entry, int] | None:
        """The copy that spares most time, and how many of the text's tokens can be used of it."""
        text: Tokens = np.array(tokens, np.int32)
        best, most_s = None, 0.0
        for entry in self._of(scope):
            usable = entry.text.extent.reach(_common(entry.text.tokens, text))
            if usable > held and entry.text.extent.length <= max_length:
                tier = self._copies["memory" if entry.is_at_hand else "disk"]
                spared_s = self._reads.of(usable - held, 1.0) - tier.of(entry.num_bytes, 0.0)
                if spared_s > most_s:
                    best, most_s = (entry, usable), spared_s
        return best

    # The index

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

    def _read_file(self, entry: _Entry) -> tuple[SavedState | None, float]:
        assert self.disk is not None
        before = self._clock()
        return self.disk.read(entry.name, entry.text), self._clock() - before

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
        """Write what memory alone has, as far as the time of `will_close` allows, and end the threads.
        Closing twice is harmless."""
        if self._is_closed:
            return
        self._is_closed = True
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
