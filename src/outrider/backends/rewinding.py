"""How a model's sequences go back to fewer tokens: a Rewinder keeps what that takes, and knows how far it
reaches. The KV of attention layers can be cut anywhere. The state of a recurrent layer has no memory of what
it was before: there are copies of it (checkpoints). A sliding window has forgotten what lies before it, and
copies serve it as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.contracts import CHECKPOINTS, FREE, UNABLE, UNLIMITED, WINDOW, Rewinding
from outrider.core.data import Span
from outrider.core.saved import Bytes, Extent, SavedState

MAX_TURNS, LAST_TURNS = 12, 5
"""Copies of a sequence's states from where a conversation turns, and how many of them are the last ones."""

Keep = Callable[[int, Bytes | None], Bytes | None]
"""Copies a sequence's state, into an older copy where that fits, or gives None where it cannot."""
Put = Callable[[int, Bytes], bool]
"""Gives a copy to a sequence, and says whether that was possible."""


class Rewinder:
    """Of a recurrent state that nothing is kept of: all of a text or nothing. A model tells it of its calls,
    and of what became of its sequences."""

    rewinding: Rewinding = UNABLE

    def before_call(self, spans: Sequence[Span]) -> None:
        """A call is about to be made."""

    def after_call(self, spans: Sequence[Span]) -> None:
        """It succeeded."""

    def reach(self, sequence: int, stored: int, length: int) -> int:  # noqa: ARG002
        """The most tokens, `length` at most and fewer than `stored`, that a sequence can go back to."""
        return 0

    def can_copy(self, source: int, stored: int, length: int) -> bool:  # noqa: ARG002
        """Whether another sequence can take over the first `length` of the `stored` tokens."""
        return False

    def put_back(self, source: int, length: int, sequence: int) -> bool:  # noqa: ARG002
        """Give a sequence the state that `source` had after `length` tokens, where there is one beside the
        KV; False where that failed."""
        return True

    def truncated(self, sequence: int, length: int) -> None:
        """A sequence went back to `length` tokens."""

    def copied(self, source: int, sequence: int, length: int) -> None:
        """An empty sequence took over the first `length` tokens of another."""

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:  # noqa: ARG002
        """How far a copy of a sequence will reach, and the states that go with it."""
        return Extent(stored, stored), []

    def restored(self, sequence: int, saved: SavedState) -> None:
        """An empty sequence got a copy."""


class Attention(Rewinder):
    """Of attention alone. Where only a window of `window_tokens` is kept (0: everything), `oldest` gives the
    first position that a sequence stores. `is_copied`: what is outside of the window goes into copies."""

    def __init__(
        self,
        rewinding: Rewinding = FREE,
        window_tokens: int = 0,
        oldest: Callable[[int], int] = lambda _sequence: 0,
        *,
        is_copied: bool = True,
    ) -> None:
        self.rewinding = rewinding
        self._is_copied = is_copied
        self._window_tokens = window_tokens
        self._oldest = oldest

    def reach(self, sequence: int, stored: int, length: int) -> int:  # noqa: ARG002
        return length if length >= self._fewest(sequence) else 0

    def can_copy(self, source: int, stored: int, length: int) -> bool:
        return self.rewinding.is_free and self.reach(source, stored, length) == length

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        # Else no more of a window is copied than the next token looks back at.
        cut_from = stored - 1 if not self._is_copied and 0 < self._window_tokens < stored else 0
        return Extent(stored, max(self._fewest(sequence), cut_from)), []

    def _fewest(self, sequence: int) -> int:
        """The fewest tokens that a sequence can keep: those that the next one looks back at are stored. There
        are no gaps, so the oldest position is enough to know."""
        if not self._window_tokens:
            return 0
        oldest = self._oldest(sequence)
        return oldest + self._window_tokens - 1 if oldest > 0 else -oldest * UNLIMITED


class Turns(Rewinder):
    """Keeps copies of states from where conversations turn: of each sequence the first, the last ones, and
    between these some that lie apart. All copies together take no more than `max_bytes`. They are never
    written to: sequences, and copies of these, share them."""

    def __init__(self, keep: Keep, put: Put, max_bytes: float = UNLIMITED) -> None:
        self._keep, self._put = keep, put
        self._max_bytes = max_bytes
        self._turns: dict[int, dict[int, Bytes]] = {}
        """by sequence and length, in ascending order"""

    def before_call(self, spans: Sequence[Span]) -> None:
        for span in spans:
            turns = self._turns.setdefault(span.sequence, {})
            is_new = span.is_turn and span.start not in turns
            if is_new and (state := self._keep(span.sequence, None)) is not None:
                turns[span.start] = state
                self._thin(turns)

    def _thin(self, turns: dict[int, Bytes]) -> None:
        if len(turns) > MAX_TURNS:
            _drop_one(turns)
        while self._num_bytes() > self._max_bytes:
            _drop_one(max(self._turns.values(), key=len))

    def _num_bytes(self) -> int:
        states = (state for turns in self._turns.values() for state in turns.values())
        return sum({id(state): state.nbytes for state in states}.values())

    def _state(self, sequence: int, length: int) -> Bytes | None:
        return self._turns.get(sequence, {}).get(length)

    def reach(self, sequence: int, stored: int, length: int) -> int:  # noqa: ARG002
        return max((at for at in self._turns.get(sequence, ()) if at <= length), default=0)

    def can_copy(self, source: int, stored: int, length: int) -> bool:
        return length == stored or self.reach(source, stored, length) == length

    def put_back(self, source: int, length: int, sequence: int) -> bool:
        state = self._state(source, length)
        return state is not None and self._put(sequence, state)

    def truncated(self, sequence: int, length: int) -> None:
        turns = self._turns.pop(sequence, {})
        if length:
            self._turns[sequence] = {at: state for at, state in turns.items() if at <= length}

    def copied(self, source: int, sequence: int, length: int) -> None:
        turns = self._turns.get(source, {})
        self._turns[sequence] = {at: state for at, state in turns.items() if at <= length}

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        turns = self._turns.get(sequence, {})
        return Extent(stored, stored, tuple(turns)), list(turns.values())

    def restored(self, sequence: int, saved: SavedState) -> None:
        self._turns[sequence] = dict(zip(saved.extent.checkpoints, saved.states, strict=True))


def _drop_one(turns: dict[int, Bytes]) -> None:
    """The one that lies nearest to its predecessor, but the first and the last ones."""
    lengths = list(turns)
    between = range(1, max(len(lengths) - LAST_TURNS, 2)) if len(lengths) > 1 else range(1)
    del turns[lengths[min(between, key=lambda i: lengths[i] - lengths[i - 1])]]


class Checkpoints(Turns):
    """Of a recurrent state of which there are copies: those of turns, and of each sequence one from before
    its last draft, which the next is written over."""

    rewinding = CHECKPOINTS

    def __init__(self, keep: Keep, put: Put, max_bytes: float = UNLIMITED) -> None:
        super().__init__(keep, put, max_bytes)
        self._drafts: dict[int, tuple[int, Bytes]] = {}

    def before_call(self, spans: Sequence[Span]) -> None:
        super().before_call(spans)
        for span in spans:
            # Of a sequence that just went back, or turns, it is there.
            if span.checkpoint and self._state(span.sequence, span.start) is None:
                _, older = self._drafts.pop(span.sequence, (0, None))
                if (state := self._keep(span.sequence, older)) is not None:
                    self._drafts[span.sequence] = span.start, state

    def _state(self, sequence: int, length: int) -> Bytes | None:
        at, state = self._drafts.get(sequence, (-1, None))
        return state if at == length else super()._state(sequence, length)

    def reach(self, sequence: int, stored: int, length: int) -> int:
        at, _ = self._drafts.get(sequence, (0, None))
        return max(at if at <= length else 0, super().reach(sequence, stored, length))

    def truncated(self, sequence: int, length: int) -> None:
        super().truncated(sequence, length)
        if not 0 < self._drafts.get(sequence, (0, None))[0] <= length:
            self._drafts.pop(sequence, None)

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        states = dict(self._turns.get(sequence, {}))
        if sequence in self._drafts:
            at, state = self._drafts[sequence]
            if at:
                states[at] = state.copy()  # it is written over
        return Extent(stored, stored, tuple(sorted(states))), [states[at] for at in sorted(states)]


class Window(Turns):
    """Of attention that keeps a window alone: as far back as it still holds what the next token looks back
    at, and to turns."""

    rewinding = WINDOW

    def __init__(self, attention: Attention, keep: Keep, put: Put, max_bytes: float = UNLIMITED) -> None:
        super().__init__(keep, put, max_bytes)
        self._attention = attention

    def reach(self, sequence: int, stored: int, length: int) -> int:
        return max(self._attention.reach(sequence, stored, length), super().reach(sequence, stored, length))

    def can_copy(self, source: int, stored: int, length: int) -> bool:  # noqa: ARG002
        return False  # the library lets go of no cell that two sequences share

    def put_back(self, source: int, length: int, sequence: int) -> bool:
        holds = self._attention.reach(source, length, length) == length
        return holds or super().put_back(source, length, sequence)

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        extent, _ = self._attention.save(sequence, stored)
        turns = self._turns.get(sequence, {})
        return Extent(stored, extent.any_from, tuple(turns)), list(turns.values())
