"""The KV cache by sequence: whose KV is kept, copied to a new request, rewound, forgotten to make room."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from outrider.core.contracts import Model
from outrider.core.data import Request
from outrider.core.errors import InputError, RewindUnsupported
from outrider.core.saved import FoundState, KvStore, Reading, SavedState, SavingModel
from outrider.core.sequences import common_prefix

_MIN_KEPT_TOKENS = 2048
"""kept even where nothing was reused lately: the last few short conversations"""
_MAX_FORGOTTEN = 32
"""texts that are remembered without their KV, to see what keeping them would have saved"""
_REUSE_RATE = 0.15
"""weight of the last request in the share of prompts that could be reused"""

_MIN_SAVED_TOKENS = 64
"""Of what a sequence holds beyond a shared beginning fewer tokens than this are given up."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The tokens that a sequence stores, or will store up to what it holds now."""

    tokens: Sequence[int]
    scope: str


class Slots:
    """The target's sequences as slots for requests.

    A slot that is given back keeps its KV for requests of the same scope, which take it over, or copy
    the beginning that they share: of a running request, too. When slots or cells are short, what was
    used longest ago goes first. `capacity_tokens` is never exceeded; tokens that sequences share are
    counted for each of them.

    What is kept makes every prompt slower to read, since attention runs over all cells: how much is kept
    follows how much of the prompts could be reused lately, from what is kept and from what was forgotten.

    A `store`, if any, gets what has to go, and gives it back where that is faster than reading it again. If
    all calls are slower for what is kept, it gets that as soon as a request runs.
    """

    def __init__(self, target: Model, store: KvStore | None = None) -> None:
        self._target = target
        self._store = store
        self._running: dict[int, _Held] = {}
        self._kept: OrderedDict[int, _Held] = OrderedDict()
        """least recently used first"""
        self._forgotten: deque[_Held] = deque(maxlen=_MAX_FORGOTTEN)
        self._reusable = 0.0
        """share of a prompt that was read before, lately"""

    @property
    def used_tokens(self) -> int:
        """Tokens that are stored for running and ended requests."""
        return sum(self._target.length(slot) for slot in (*self._running, *self._kept))

    def take(self, request: Request, tokens: Sequence[int]) -> int:
        """A slot for a request, which holds as much of its prompt as is stored anywhere for its scope, but
        the last token: its logits are where generation starts. `tokens` is the list that the
        request's tokens will be appended to. One slot at least must be free."""
        prompt = request.prompt
        source, shared = self._closest(request)
        found = self._find(request, shared)
        if found is not None:
            slot = self._restore(found)
            if slot is None:  # it is not found again
                return self.take(request, tokens)
        else:
            slot = self._destination(source, shared)
            lost = self._target.length(slot) - (shared if slot == source else 0)
            if slot in self._kept and (slot != source or lost > shared):
                self._put_away(slot, self._kept[slot])
            if slot == source or not shared:
                rewind(self._target, slot, shared)
            else:
                self._target.truncate(slot, 0)
                self._copy(source, slot, shared)
            self._kept.pop(slot, None)
            if source in self._kept:
                self._kept.move_to_end(source)
        self._note_reusable(request, max(shared, self._target.length(slot)))
        self._running[slot] = _Held(tokens, request.scope)
        if self._store is not None and cast(SavingModel, self._target).attends_to_all:
            for other in list(self._kept):
                self._forget(other)
        assert self._target.length(slot) < len(prompt)
        return slot

    def _find(self, request: Request, shared: int) -> FoundState | None:
        """More of a prompt than is stored here, where it pays to get it out of the store."""
        if self._store is None:
            return None
        return self._store.find(request.scope, request.prompt[:-1], shared, self._longest)

    def read_ahead(self, request: Request, when_done: Callable[[], None]) -> Reading | None:
        """Begin to read what the store has of a prompt, as in `KvStore`."""
        if self._store is None:
            return None
        shared = self._closest(request)[1]
        return self._store.read_ahead(request.scope, request.prompt[:-1], shared, self._longest, when_done)

    @property
    def _longest(self) -> int:
        """The most tokens that a request may get out of the store."""
        room = self._target.capacity_tokens - sum(map(self._target.length, self._running))
        return min(room, self._target.context_length)

    def _restore(self, found: FoundState) -> int | None:
        """A sequence that holds what was found; None where that turned out to be of no use."""
        assert self._store is not None
        slot = self._destination(-1, 0)
        if slot in self._kept:
            self._forget(slot)
        self.make_room(found.length)
        self._target.truncate(slot, 0)
        if not self._store.restore(found, slot):
            return None
        rewind(self._target, slot, found.num_tokens)
        return slot

    def _put_away(self, slot: int, held: _Held) -> None:
        """What a sequence stores is about to be forgotten."""
        if self._store is not None:
            self._store.keep(slot, held.scope, held.tokens)

    def _closest(self, request: Request) -> tuple[int, int]:
        """The sequence that stores most of a prompt, and how much; one that has ended before one that runs.
        -1 and 0 where none stores anything of it."""
        best, most = -1, 0
        for slot, held in (*reversed(self._kept.items()), *self._running.items()):
            if held.scope == request.scope:
                stored = min(self._target.length(slot), len(request.prompt) - 1)
                shared = self._target.reach(slot, min(common_prefix(held.tokens, request.prompt), stored))
                if shared > most:
                    best, most = slot, shared
        return best, most

    def _destination(self, source: int, shared: int) -> int:
        """Where the request is to run: on what it goes on from, else on an empty sequence, else on the one
        that was used longest ago."""
        all_slots = range(self._target.max_sequences)
        empty = [slot for slot in all_slots if slot not in self._running and slot not in self._kept]
        if source in self._kept:
            others = [*empty, *(slot for slot in self._kept if slot != source)]
            lost = self._target.length(source) - shared
            if lost < _MIN_SAVED_TOKENS or not others or not self._target.rewinding.is_free:
                return source
            return others[0]
        return next(iter((*empty, *self._kept)))

    def _note_reusable(self, request: Request, shared: int) -> None:
        prompt = request.prompt
        for held in self._forgotten:
            if held.scope == request.scope:
                shared = max(shared, common_prefix(held.tokens, prompt))
        self._reusable += _REUSE_RATE * (shared / len(prompt) - self._reusable)

    def _copy(self, source: int, slot: int, shared: int) -> None:
        try:
            self._target.copy(source, slot, shared)
        except RewindUnsupported:
            return  # read again

    def give_back(self, slot: int, *, cancelled: bool = False) -> None:
        """The request on a slot has ended; what it stored is kept until the room is needed. Of one that was
        cancelled, which hardly anybody goes on from, it is the first to go, and never exceeds the budget."""
        held = self._running.pop(slot)
        if self._target.length(slot):
            self._kept[slot] = held
        budget = max(_MIN_KEPT_TOKENS, self._reusable * self._target.capacity_tokens)
        if cancelled and slot in self._kept:
            self._kept.move_to_end(slot, last=False)
        while sum(map(self._target.length, self._kept)) > budget:
            oldest = next(iter(self._kept))
            if len(self._kept) == 1 and not (cancelled and oldest == slot):
                break
            self._forget(oldest)

    def make_room(self, num_tokens: int) -> None:
        """Forget what ended requests left, the oldest first, until so many more tokens can be stored."""
        while self._kept and self.used_tokens + num_tokens > self._target.capacity_tokens:
            self._forget(next(iter(self._kept)))

    # What a caller asks for

    def texts(self, scope: str) -> list[int]:
        """The sequences that store texts of a scope, the last used first."""
        sequences = [*reversed(self._running), *reversed(self._kept)]
        return [slot for slot in sequences if self._held(slot).scope == scope and self._target.length(slot)]

    def saved(self, slot: int) -> tuple[list[int], SavedState]:
        """The tokens of a text that is stored, and a copy of what is. Raises BackendError."""
        length = self._target.length(slot)
        return list(self._held(slot).tokens[:length]), cast(SavingModel, self._target).save(slot)

    def put(self, scope: str, tokens: Sequence[int], state: SavedState) -> None:
        """Store a text that was saved, for requests of a scope. Raises InputError where there is no room now,
        BackendError where the copy is of no use."""
        running = sum(map(self._target.length, self._running))
        is_full = len(self._running) == self._target.max_sequences
        if is_full or running + state.extent.length > self._target.capacity_tokens:
            raise InputError(
                "slot", "running requests leave no room for it", "Ask again when they have ended."
            )
        slot = self._destination(-1, 0)
        if slot in self._kept:
            self._forget(slot)
        self.make_room(state.extent.length)
        self._target.truncate(slot, 0)
        cast(SavingModel, self._target).restore(slot, state)
        self._kept[slot] = _Held(tokens, scope)

    def erase(self, slot: int) -> int:
        """Forget a text for good, unless a request runs on it; returns how many tokens were stored."""
        if slot in self._running:
            raise InputError("slot", "a request runs on it", "Ask again when it has ended.")
        length = self._target.length(slot)
        self._forget(slot, put_away=False)
        return length

    def _held(self, slot: int) -> _Held:
        return self._running[slot] if slot in self._running else self._kept[slot]

    def clear(self, *, put_away: bool = False) -> None:
        """Forget what ended requests left, what was used last first; `put_away`: the store gets it, else it
        forgets all that it has."""
        for slot in reversed(list(self._kept)):
            self._forget(slot, put_away=put_away)
        self._forgotten.clear()
        if self._store is not None and not put_away:
            self._store.forget()

    def _forget(self, slot: int, *, put_away: bool = True) -> None:
        held = self._kept.pop(slot)
        self._forgotten.append(held)
        if put_away:
            self._put_away(slot, held)
        self._target.truncate(slot, 0)


def rewind(target: Model, slot: int, length: int) -> None:
    """Keep `length` tokens, or fewer where the target cannot go back to just there: the others are evaluated
    again."""
    if target.length(slot) > length:
        try:
            target.truncate(slot, target.reach(slot, length))
        except RewindUnsupported:
            target.truncate(slot, 0)
