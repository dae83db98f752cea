"""How a model's sequences go back to fewer tokens: a Rewinder keeps what that takes, and knows how far it
reaches.

The KV of attention layers can be cut anywhere. The state of a recurrent layer has no memory of what it was
before: there are copies of it (checkpoints), or a library keeps its last states itself (snapshots).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.contracts import CHECKPOINTS, FREE, UNABLE, UNLIMITED, Rewinding, snapshots
from outrider.core.data import Span
from outrider.core.saved import Bytes, Extent, SavedState


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

    def copied(self, source: int) -> None:
        """Another sequence took over a text."""

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


class Snapshots(Rewinder):
    """Of a recurrent state of which the library keeps the last `count`. A snapshot is good for once, right
    after the call that it was made in."""

    def __init__(self, count: int) -> None:
        self.rewinding = snapshots(count)
        self._count = count
        self._fresh: dict[int, int] = {}
        """how many of a sequence's last tokens can be forgotten"""
        self._past: set[int] = set()
        """sequences that went back: their state is restored by their next call"""

    def before_call(self, spans: Sequence[Span]) -> None:  # noqa: ARG002
        self._fresh.clear()  # it moves those of sequences that take no part, too

    def after_call(self, spans: Sequence[Span]) -> None:
        self._fresh.update((span.sequence, min(len(span.tokens) - 1, self._count)) for span in spans)
        self._past.difference_update(self._fresh)

    def reach(self, sequence: int, stored: int, length: int) -> int:
        return length if stored - length <= self._fresh.get(sequence, 0) else 0

    def can_copy(self, source: int, stored: int, length: int) -> bool:
        return length == stored and source not in self._past

    def truncated(self, sequence: int, length: int) -> None:
        self._fresh.pop(sequence, None)
        (self._past.add if length else self._past.discard)(sequence)

    def copied(self, source: int) -> None:
        self._fresh.pop(source, None)  # both hold one state until the next call

    def restored(self, sequence: int, saved: SavedState) -> None:  # noqa: ARG002
        self.truncated(sequence, 0)


class Checkpoints(Rewinder):
    """Of a recurrent state of which there are copies: of each sequence one from before its last draft, and
    one from near its prompt's end.

    `keep` copies a sequence's state, into an older copy where that fits, or gives None where it cannot; `put`
    gives a copy to a sequence, and says whether that was possible.
    """

    rewinding = CHECKPOINTS

    def __init__(
        self, keep: Callable[[int, Bytes | None], Bytes | None], put: Callable[[int, Bytes], bool]
    ) -> None:
        self._keep, self._put = keep, put
        self._kept: dict[int, dict[bool, tuple[int, Bytes]]] = {}
        """by sequence and whether the span had a draft: the length, and the state"""

    def before_call(self, spans: Sequence[Span]) -> None:
        for span in spans:
            kept = self._kept.setdefault(span.sequence, {})
            if not span.checkpoint or any(length == span.start for length, _ in kept.values()):
                continue  # of a sequence that just went back it is there
            _, older = kept.pop(span.rows > 1, (0, None))
            if (state := self._keep(span.sequence, older)) is not None:
                kept[span.rows > 1] = (span.start, state)

    def reach(self, sequence: int, stored: int, length: int) -> int:  # noqa: ARG002
        kept = self._kept.get(sequence, {}).values()
        return max((at for at, _ in kept if at <= length), default=0)

    def can_copy(self, source: int, stored: int, length: int) -> bool:
        return length == stored or self.reach(source, stored, length) == length

    def put_back(self, source: int, length: int, sequence: int) -> bool:
        kept = self._kept.get(source, {}).values()
        state = next((state for at, state in kept if at == length), None)
        return state is not None and self._put(sequence, state)

    def truncated(self, sequence: int, length: int) -> None:
        kept = self._kept.pop(sequence, {})
        if length:
            self._kept[sequence] = {of: found for of, found in kept.items() if found[0] <= length}

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        kept = {length: state for length, state in self._kept.get(sequence, {}).values() if length}
        lengths = tuple(sorted(kept))
        # They are written over.
        return Extent(stored, stored, lengths), [kept[length].copy() for length in lengths]

    def restored(self, sequence: int, saved: SavedState) -> None:
        pairs = zip(saved.extent.checkpoints, saved.states, strict=True)
        # The first is that of its prompt.
        self._kept[sequence] = {bool(i): (at, state.copy()) for i, (at, state) in enumerate(pairs)}
