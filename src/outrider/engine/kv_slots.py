"""The KV cache by sequence: whose KV is kept, reused by a new request, evicted to make room; what of a prompt
was read or written before, and where the next text may part from it."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Request
from outrider.core.errors import RewindUnsupported
from outrider.core.sequences import common_prefix
from outrider.engine.sequence import RunningRequest, num_missing
from outrider.engine.tiers import KvTiers, Reading

if TYPE_CHECKING:
    from outrider.drafters.model import ModelDrafter

_MIN_KEPT_TOKENS = 2048
"""kept even where nothing was reused lately: the last few short conversations"""
_MAX_EVICTED = 32
"""texts that are remembered without their KV, to see what keeping them would have saved"""
_REUSE_RATE = 0.15
"""weight of the last request in the share of prompts that could be reused"""
_MIN_SAVED_TOKENS = 64
"""What a sequence holds beyond a shared beginning is given up where it is fewer tokens than this."""
_MIN_TURN_TOKENS = 64
"""Fewer are read again."""
_MESSAGE_TOKENS = 256
"""of a message that is worth a copy at its end"""
_PART_TOKENS = 1024
"""Longer messages, and texts without control tokens, are worth one in so many: they may be edited inside."""
_LAST_TOKENS = 16
"""The next turn begins like this prompt, but for what its template puts before an answer."""
_MIN_AWAITED_TOKENS = 16
"""Fewer are read with the call that a request would wait for."""


class _Held(NamedTuple):
    """The tokens that a sequence stores, or will store up to what it holds now."""

    tokens: Sequence[int]
    scope: str


class Slots:
    """The target's sequences as slots for requests.

    A slot that is given back keeps its KV for requests of the same scope, which go on from it, or copy the
    beginning that they share with it: of a running request, too. Where slots or cells are short, what was
    used longest ago is evicted; tokens that sequences share are counted for each of them. Since attention
    runs over all cells, how much is kept follows how much of the prompts could be reused lately.

    A `store`, if any, gets what is evicted, and gives it back. If all calls are slower for what is kept, it
    gets that as soon as a request runs.
    """

    def __init__(self, target: Model, store: KvTiers | None = None) -> None:
        self._target = target
        self._store = store
        self._running: dict[int, _Held] = {}
        self._kept: OrderedDict[int, _Held] = OrderedDict()
        """least recently used first"""
        self._evicted: deque[_Held] = deque(maxlen=_MAX_EVICTED)
        self._reusable = 0.0
        """share of a prompt that was read before, lately"""

    @property
    def used_tokens(self) -> int:
        return sum(self._target.length(slot) for slot in (*self._running, *self._kept))

    def take(self, request: Request, tokens: Sequence[int]) -> int:
        """A slot for a request, which holds as much of its prompt as is stored anywhere for its scope, but
        the last token: its logits are where generation starts. `tokens` is the list that the
        request's tokens will be appended to. One slot at least must be free."""
        slot = self._restored(request)
        if slot is None:
            source, shared = self._match(request)
            slot = self._allocate(source, shared)
            if slot != source and shared:
                with suppress(RewindUnsupported):  # then it is read again
                    self._target.copy(source, slot, shared)
        self._note_reusable(request, self._target.length(slot))
        self._running[slot] = _Held(tokens, request.scope)
        if self._store is not None and self._store.model.attends_to_all:
            for other in list(self._kept):
                self._evict(other)
        assert self._target.length(slot) < len(request.prompt)
        return slot

    def as_served(self, request: Request) -> Request:
        """A request whose prompt is text with the tokens that were generated for it, as far as some text that
        is stored has them."""
        if not (request.from_text and request.cache_prompt):
            return request
        prompt, texts = request.prompt, [held.tokens for _, held in self._of(request.scope)]
        if self._store is not None:
            texts += self._store.texts(request.scope, prompt)
        equal = [common_prefix(text, prompt) for text in texts]
        longest = max(equal, default=0)
        alike = [text for text, length in zip(texts, equal, strict=True) if length == longest]
        found = [respelled(prompt, text, self._target.vocabulary) for text in alike]
        prompt, reached, num_other = max(found, key=lambda one: one[1], default=(prompt, 0, 0))
        if reached <= longest or len(prompt) >= self._target.context_length:
            return request
        return replace(request, prompt=prompt, from_text=False, respelled_tokens=num_other)

    # Where texts part: what the next one may share, which a model that goes back to copies of its state alone
    # has to keep one of.

    def turns_of(self, request: Request) -> list[int]:
        """Numbers of tokens after which a text may go on otherwise, in ascending order: the end of the system
        prompt and of each long message, where a control token stands; places within what has none; the end of
        what the prompt has in common with an earlier text; and shortly before the prompt's end."""
        prompt, end = request.prompt, len(request.prompt) - _LAST_TOKENS
        if not self._target.rewinding.keeps_turns or len(prompt) < _MIN_TURN_TOKENS:
            return []
        is_control = self._target.vocabulary.is_control
        controls = {at for at, token in enumerate(prompt[:end]) if is_control(token)}
        system = min((at for at in controls if at >= _MIN_TURN_TOKENS), default=0)
        found = [system] if system else []
        for at in range(system, end):
            size = at - (found[-1] if found else 0)
            if size >= _PART_TOKENS or (size >= _MESSAGE_TOKENS and at in controls):
                found.append(at)
        common = max((common_prefix(held.tokens, prompt) for _, held in self._of(request.scope)), default=0)
        if common < end and all(abs(common - at) >= _MIN_TURN_TOKENS for at in (0, *found)):
            found.append(common)
        return sorted({*found, end})

    def will_share(self, other: RunningRequest, request: Request) -> bool:
        """Whether a running request is about to store a beginning of a prompt that nothing stores yet. To
        wait for it takes no longer than to read it: the other is ahead, and both would share their calls."""
        target = self._target
        if not (request.cache_prompt and target.rewinding.copies_beginnings):
            return False
        if other.request.scope != request.scope or other.num_generated or not num_missing(target, other):
            return False
        stored = self._match(request)[1]
        if self._store is not None:
            stored = max(stored, self._store.num_found(*self._sought(request)))
        shared = min(common_prefix(other.tokens, request.prompt), len(request.prompt) - 1)
        if shared <= target.length(other.slot) or shared - stored < _MIN_AWAITED_TOKENS:
            return False
        if target.rewinding.keeps_turns and shared not in other.turns:
            insort(other.turns, shared)
        return True

    def _of(self, scope: str) -> Iterator[tuple[int, _Held]]:
        """The sequences of a scope: those of ended requests first, what was used last before others."""
        every = (*reversed(self._kept.items()), *reversed(self._running.items()))
        return ((slot, held) for slot, held in every if held.scope == scope)

    def _match(self, request: Request) -> tuple[int, int]:
        """The sequence that stores most of a prompt, and how much; one that has ended before one that runs.
        -1 and 0 where none stores anything of it."""
        best, most = -1, 0
        if not request.cache_prompt:
            return best, most
        for slot, held in self._of(request.scope):
            stored = min(self._target.length(slot), len(request.prompt) - 1)
            shared = self._target.reach(slot, min(common_prefix(held.tokens, request.prompt), stored))
            if shared > most:
                best, most = slot, shared
        return best, most

    def _allocate(self, source: int = -1, shared: int = 0) -> int:
        """A free slot. Where little is lost by it, or there is no other, that is the source, cut to what is
        shared; else an empty one, or the one that was used longest ago, whose KV is evicted."""
        taken = self._running.keys() | self._kept.keys()
        empty = (slot for slot in range(self._target.max_sequences) if slot not in taken)
        others = [slot for slot in (*empty, *self._kept) if slot != source]
        if source in self._kept:
            self._kept.move_to_end(source)
            lost = self._target.length(source) - shared
            if lost < _MIN_SAVED_TOKENS or not others or not self._target.rewinding.copies_beginnings:
                held = self._kept.pop(source)
                if lost > shared:
                    self._put_away(source, held)
                rewind(self._target, source, shared)
                return source
        slot = others[0]
        if slot in self._kept:
            self._evict(slot)
        self._target.truncate(slot, 0)
        return slot

    def _restored(self, request: Request) -> int | None:
        """A slot with what the store has of a prompt; None where it has hardly more than is stored here."""
        while self._store is not None and request.cache_prompt:
            if (found := self._store.find(*self._sought(request))) is None:
                break
            slot = self._allocate()
            self.make_room(found.state.extent.length)
            if self._store.restore(found, slot):
                rewind(self._target, slot, found.num_tokens)
                return slot
        return None

    def read_ahead(self, request: Request, when_done: Callable[[], None]) -> Reading | None:
        if self._store is None or not request.cache_prompt:
            return None
        return self._store.read_ahead(*self._sought(request), when_done)

    def _sought(self, request: Request) -> tuple[str, tuple[int, ...], int, int]:
        """What the store is asked for: of a scope, the tokens of a prompt, beyond those that are stored here,
        in no more than the tokens that there is room for."""
        room = self._target.capacity_tokens - sum(map(self._target.length, self._running))
        most = min(room, self._target.context_length)
        return request.scope, request.prompt[:-1], self._match(request)[1], most

    def _put_away(self, slot: int, held: _Held) -> bool:
        return self._store is None or self._store.keep(slot, held.scope, held.tokens)

    def keep(self) -> bool:
        """The store gets copies of what ended requests left, of what was used last first."""
        return all([self._put_away(slot, held) for slot, held in reversed(self._kept.items())])

    def _note_reusable(self, request: Request, shared: int) -> None:
        evicted = [held.tokens for held in self._evicted if held.scope == request.scope]
        shared = max([shared, *(common_prefix(tokens, request.prompt) for tokens in evicted)])
        self._reusable += _REUSE_RATE * (shared / len(request.prompt) - self._reusable)

    def give_back(self, slot: int) -> None:
        """The request on a slot has ended; what it stored is kept until the room is needed."""
        held = self._running.pop(slot)
        if self._target.length(slot):
            self._kept[slot] = held
        budget = max(_MIN_KEPT_TOKENS, self._reusable * self._target.capacity_tokens)
        while len(self._kept) > 1 and sum(map(self._target.length, self._kept)) > budget:
            self._evict(next(iter(self._kept)))

    def make_room(self, num_tokens: int) -> None:
        """Evict what ended requests left, the oldest first, until so many more tokens can be stored."""
        while self._kept and self.used_tokens + num_tokens > self._target.capacity_tokens:
            self._evict(next(iter(self._kept)))

    def clear(self, *, put_away: bool = False) -> None:
        """Evict what ended requests left, what was used last first; `put_away`: the store gets it, else it
        forgets all that it has."""
        for slot in reversed(list(self._kept)):
            self._evict(slot, put_away=put_away)
        self._evicted.clear()
        if self._store is not None and not put_away:
            self._store.forget()

    def _evict(self, slot: int, *, put_away: bool = True) -> None:
        held = self._kept.pop(slot)
        self._evicted.append(held)
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


class DraftKv:
    """Gives the store what a draft model gives up, and the model what the store has of a prompt."""

    def __init__(self, drafter: ModelDrafter, store: KvTiers) -> None:
        self._drafter = drafter
        self._store = store
        drafter.on_evict = self._put_away

    def _put_away(self, sequence: int) -> bool:
        scope, tokens = self._drafter.text(sequence)
        return not tokens or self._store.keep(sequence, scope, tokens)

    def keep(self) -> bool:
        """The store gets copies of what the model holds; as `KvTiers.keep`."""
        return all([self._put_away(sequence) for sequence in range(self._drafter.model.max_sequences)])

    def begin(self, sequence: int, request: Request) -> None:
        """A request has begun on a sequence: what the store has of its prompt comes back, where that is more
        than the model holds."""
        if request.cache_prompt and (found := self._store.find(*self._sought(request))) is not None:
            tokens = found.entry.text.tokens.tolist()
            self._drafter.take(sequence, tokens, lambda: self._store.restore(found, sequence))

    def read_ahead(self, request: Request, when_done: Callable[[], None]) -> Reading | None:
        return self._store.read_ahead(*self._sought(request), when_done) if request.cache_prompt else None

    def _sought(self, request: Request) -> tuple[str, Sequence[int], int, int]:
        tokens = self._drafter.alignment.read(request.prompt)[:-1]
        held = self._drafter.num_shared(request.scope, tokens)
        return request.scope, tokens, held, self._drafter.model.context_length

    def reset(self, *, texts: bool) -> None:
        """The model forgets all; with `texts` the store, too, else that gets it."""
        if texts:
            self._store.forget()
        else:
            self.keep()


# A client sends an answer back as text, whose tokenization need not be the one that was generated. Where both
# spell the same, the tokens that were served are the ones whose KV is stored.


def respelled(
    prompt: Sequence[int], served: Sequence[int], vocabulary: Vocabulary
) -> tuple[tuple[int, ...], int, int]:
    """A prompt whose beginning has the tokens of a `served` text, as far as both spell the same (control
    tokens spell nothing), how many tokens of it that is, and how many of these are not the prompt's own."""
    at = served_at = same_at = same_served = num_other = 0
    mine = its = b""  # what one of them has spelled beyond the other
    while True:
        if not (mine or its):
            num_other += served_at - same_served
            equal = common_prefix(prompt[at:], served[served_at:])
            at, served_at = same_at, same_served = at + equal, served_at + equal
        text, place = (prompt, at) if its else (served, served_at)
        piece = vocabulary.piece(text[place]) if place < len(text) else b""
        if its:
            mine, at = mine + piece, at + 1
        else:
            its, served_at = piece, served_at + 1
        shared = min(len(mine), len(its))
        if not piece or mine[:shared] != its[:shared]:
            return (*served[:same_served], *prompt[same_at:]), same_served, num_other
        mine, its = mine[shared:], its[shared:]
