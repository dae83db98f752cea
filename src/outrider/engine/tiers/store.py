"""Texts whose KV has left a model, in memory and on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from threading import Lock, Thread
from time import monotonic, perf_counter
from weakref import ref

import numpy as np

from outrider.core.errors import BackendError
from outrider.core.saved import FoundState, Reading, SavedState, SavingModel
from outrider.engine.tiers.counts import Rate, TierCounts
from outrider.engine.tiers.disk import Disk, SavedText, Tokens

_log = logging.getLogger(__name__)

_MAX_WAITING = 2
"""Copies that wait to be written: where the disk is slower than texts come, some are not written."""


_Read = Future[tuple[SavedState | None, float]]
"""What a file gives, None where it is of no use, and the seconds that it took."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A text that is kept: in memory (`state`), on disk (`num_disk_bytes`), or both."""

    text: SavedText
    num_bytes: int
    name: str
    state: SavedState | None = None
    num_disk_bytes: int = 0
    is_waiting: bool = False
    """to be written"""
    generation: int = 0
    """how often all texts were forgotten before it came"""
    reading_ref: ref[_Read] | None = None
    used_s: float = field(default_factory=monotonic)

    @property
    def reading(self) -> _Read | None:
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


@dataclass(frozen=True, slots=True)
class _Found:
    """A copy that was found, and is in memory."""

    entry: _Entry
    state: SavedState
    num_tokens: int
    tier: str
    read_s: float

    @property
    def length(self) -> int:
        return self.entry.text.extent.length


class KvTiers:
    """A KvStore of `memory_bytes` in memory (0: none) and on `disk`, if any.

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
        self._model = model
        self._clock = clock
        self._memory_bytes = memory_bytes
        self._disk = disk
        self.counts = TierCounts()
        self._entries: dict[str, list[_Entry]] = {}
        """by scope"""
        self._lock = Lock()
        self._reads = Rate()
        self._copies = {"memory": Rate(), "disk": Rate()}
        self._token_bytes = Rate()
        self._generation = 0
        self._reader = ThreadPoolExecutor(1, "kv reader")
        self._closing_until_s: float | None = None
        self._waiting: Queue[tuple[_Entry, SavedState] | None] = Queue(_MAX_WAITING)
        self._writer = Thread(target=self._write_all, name="kv writer", daemon=True)
        if disk is not None:
            for name, text, num_bytes, num_disk_bytes in disk.found():
                entry = _Entry(text, num_bytes, name, None, num_disk_bytes)
                self._entries.setdefault(text.scope, []).append(entry)
            self._writer.start()
        self._count_bytes()

    # As a KvStore

    def keep(self, sequence: int, scope: str, tokens: Sequence[int]) -> None:
        held: Tokens = np.array(tokens[: self._model.length(sequence)], np.int32)
        scope = self._scope(scope)
        with self._lock:
            same = next((e for e in self._entries.get(scope, ()) if e.covers(held)), None)
            if same is not None:
                same.used_s = monotonic()
                return
        if not self._pays_to_keep(held.size):
            return
        before = self._clock()
        try:
            state = self._model.save(sequence)
        except (BackendError, MemoryError) as error:
            _log.warning("a text is not kept: %s", error or "there is no memory for it")
            return
        num_bytes = sum(part.nbytes for part in state.parts)
        self._token_bytes.note(held.size, num_bytes)
        if not self._copies["memory"].units:  # the way out is much like the way back
            self._copies["memory"].note(num_bytes, self._clock() - before)
        text = SavedText(scope, held, state.extent)
        entry = _Entry(text, num_bytes, self._name(text), state, generation=self._generation)
        with self._lock:
            self._entries.setdefault(scope, []).append(entry)
            self.counts.kept += 1
        self._to_disk(entry, state)
        self._shrink_memory()

    def find(self, scope: str, tokens: Sequence[int], held: int, max_length: int) -> FoundState | None:
        text: Tokens = np.array(tokens, np.int32)
        while (best := self._best(self._scope(scope), text, held, max_length)) is not None:
            entry, usable = best
            state, tier, read_s = entry.state, "memory", 0.0
            if state is None:
                reading = self._reading(entry)
                if reading is None:
                    continue
                (state, read_s), tier = reading.result(), "disk"
            if state is not None:
                entry.used_s = monotonic()
                return _Found(entry, state, usable, tier, read_s)
            self._drop(entry)
        self.counts.misses += 1
        return None

    def read_ahead(
        self, scope: str, tokens: Sequence[int], held: int, max_length: int, when_done: Callable[[], None]
    ) -> Reading | None:
        best = self._best(self._scope(scope), np.array(tokens, np.int32), held, max_length)
        if best is None or best[0].is_at_hand:
            return None
        reading = self._reading(best[0])
        if reading is not None:
            reading.add_done_callback(lambda _: when_done())
        return reading

    def _reading(self, entry: _Entry) -> _Read | None:
        """What reads an entry: the file stays as long as it is held. None where the file has gone."""
        with self._lock:
            reading = entry.reading
            if reading is None and entry.num_disk_bytes:
                reading = self._reader.submit(self._read_file, entry)
                entry.reading_ref = ref(reading)
            return reading

    def _read_file(self, entry: _Entry) -> tuple[SavedState | None, float]:
        assert self._disk is not None
        before = self._clock()
        return self._disk.read(entry.name, entry.text), self._clock() - before

    def restore(self, found: FoundState, sequence: int) -> bool:
        assert isinstance(found, _Found)
        before = self._clock()
        try:
            self._model.restore(sequence, found.state)
        except BackendError as error:
            _log.warning("kept KV is not used: %s", error)
            self._drop(found.entry)
            return False
        self._copies[found.tier].note(found.entry.num_bytes, found.read_s + self._clock() - before)
        if self._disk is not None and found.entry.num_disk_bytes:
            self._disk.used(found.entry.name)
        self.counts.hits[found.tier] += 1
        self.counts.restored_tokens[found.tier] += found.num_tokens
        if self._memory_bytes and found.entry.state is None:
            found.entry.state = found.state
            self._shrink_memory()
        return True

    def forget(self) -> None:
        with self._lock:
            self._generation += 1
            for entry in self._all():
                if self._disk is not None and entry.num_disk_bytes:
                    self._disk.remove(entry.name)
            self._entries.clear()
        self._count_bytes()

    def note_read(self, num_tokens: int, seconds: float) -> None:
        self._reads.note(num_tokens, seconds)

    # What pays

    def _pays_to_keep(self, num_tokens: int) -> bool:
        """Whether to restore so many tokens would take less time than to read them."""
        num_bytes = self._token_bytes.of(num_tokens, 0.0)
        tier = self._copies["memory" if self._memory_bytes else "disk"]
        return self._reads.of(num_tokens, 1.0) > tier.of(num_bytes, 0.0)

    def _best(self, scope: str, text: Tokens, held: int, max_length: int) -> tuple[_Entry, int] | None:
        """The copy that spares most time, and how many of the text's tokens can be used of it."""
        best, most_s = None, 0.0
        with self._lock:
            entries = list(self._entries.get(scope, ()))
        for entry in entries:
            usable = entry.text.extent.reach(_common(entry.text.tokens, text))
            if usable > held and entry.text.extent.length <= max_length:
                tier = self._copies["memory" if entry.is_at_hand else "disk"]
                spared_s = self._reads.of(usable - held, 1.0) - tier.of(entry.num_bytes, 0.0)
                if spared_s > most_s:
                    best, most_s = (entry, usable), spared_s
        return best

    # The tiers

    def _scope(self, scope: str) -> str:
        return self._disk.folder.digest(scope) if self._disk else scope

    def _name(self, text: SavedText) -> str:
        return self._disk.folder.name_of(text.scope, text.tokens.tobytes().hex()) if self._disk else ""

    def _all(self) -> Iterator[_Entry]:
        for entries in self._entries.values():
            yield from entries

    def _shrink_memory(self) -> None:
        """Forget copies in memory, those first that were used longest ago, until they are no more than may
        be."""
        with self._lock:
            held = sorted((e for e in self._all() if e.state is not None), key=lambda e: e.used_s)
            total = sum(entry.num_bytes for entry in held)
            for entry in held:
                if total <= self._memory_bytes:
                    break
                total -= entry.num_bytes
                self._let_go(entry)
        self._count_bytes()

    def _let_go(self, entry: _Entry) -> None:
        """Out of memory; the lock is held."""
        entry.state = None
        if not entry.num_disk_bytes:
            self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        """Out of the index, where it is there; the lock is held."""
        entries = self._entries.get(entry.text.scope, [])
        if entry in entries:
            entries.remove(entry)

    def _drop(self, entry: _Entry) -> None:
        """Out of both tiers."""
        with self._lock:
            self.counts.refused += 1
            self._remove(entry)
            entry.state = None
        self._count_bytes()

    def _count_bytes(self) -> None:
        with self._lock:
            memory = sum(entry.num_bytes for entry in self._all() if entry.state is not None)
            self.counts.num_bytes = {"memory": memory, "disk": self._disk.num_bytes if self._disk else 0}

    # Writing

    def _to_disk(self, entry: _Entry, state: SavedState) -> None:
        if self._disk is None:
            self._replace(entry)
            return
        until_s = self._closing_until_s
        entry.is_waiting = True
        try:
            if until_s is None:
                self._waiting.put_nowait((entry, state))
            else:
                self._waiting.put((entry, state), timeout=max(until_s - monotonic(), 0.001))
        except Full:
            entry.is_waiting = False
            self.counts.not_written += 1

    def _write_all(self) -> None:
        """The writer's thread."""
        while (job := self._waiting.get()) is not None:
            entry, state = job
            if entry.generation == self._generation:
                self._write(entry, state)

    def _write(self, entry: _Entry, state: SavedState) -> None:
        assert self._disk is not None
        with self._lock:
            spared = {other.name for other in self._all() if other.reading is not None}
            to_remove = self._disk.to_remove(entry.text, state, spared)
            names = {path.stem for path in to_remove or ()}
            for other in [e for e in self._all() if e.name in names and e is not entry]:
                other.num_disk_bytes = 0
                if other.state is None:
                    self._remove(other)
        size = 0 if to_remove is None else self._disk.write(entry.name, entry.text, state, to_remove)
        with self._lock:
            self.counts.not_written += not size
            entry.num_disk_bytes, entry.is_waiting = size, False
            if entry.generation != self._generation:
                self._disk.remove(entry.name)
                return
            self._remove(entry)  # where memory has let it go it is not there
            if size or entry.state is not None:
                self._entries.setdefault(entry.text.scope, []).append(entry)
        self._replace(entry)
        self._count_bytes()

    def _replace(self, entry: _Entry) -> None:
        """Forget the beginnings of an entry that it can give as well."""
        with self._lock:
            known = self._entries.get(entry.text.scope, [])
            for other in [e for e in known if e is not entry and entry.covers(e.text.tokens)]:
                if other.reading is not None:  # a request is about to begin with it
                    continue
                known.remove(other)
                other.state = None
                if self._disk is not None and other.num_disk_bytes:
                    self._disk.remove(other.name)

    def will_close(self, until_s: float) -> None:
        """From now on what is kept waits for the disk, until that moment of `monotonic` at most."""
        self._closing_until_s = until_s

    def close(self) -> None:
        """Write what memory alone has, as far as the time of `will_close` allows, and end the thread. Closing
        twice is harmless."""
        until_s, self._closing_until_s = self._closing_until_s or 0.0, None
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._disk is None or not self._writer.is_alive():
            return
        self._closing_until_s = until_s
        with self._lock:
            alone = [e for e in self._all() if not e.num_disk_bytes and not e.is_waiting]
            held = [(entry, entry.state) for entry in alone if entry.state is not None]
        for entry, state in sorted(held, key=lambda pair: -pair[0].used_s):
            self._to_disk(entry, state)
        while True:
            try:
                self._waiting.put(None, timeout=max(until_s - monotonic(), 0.001))
                break
            except Full:  # the time is over
                with suppress(Empty):
                    self._waiting.get_nowait()
        self._writer.join(max(until_s - monotonic(), 0.001))


def _common(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts begin with in common."""
    size = min(one.size, other.size)
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
