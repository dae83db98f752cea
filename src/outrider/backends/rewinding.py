"""How a model's sequences go back to fewer tokens. The KV of attention layers can be cut anywhere. The state
of a recurrent layer has no memory of what it was before: there are copies of it (checkpoints). A sliding
window has forgotten what lies before it, and copies serve it as well. Whether a library restores a recurrent
state is found out by trying: some versions of llama.cpp say that one was restored which was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

import numpy as np

from outrider.core.contracts import (
    CHECKPOINTS,
    FREE,
    UNABLE,
    UNLIMITED,
    WINDOW,
    Bytes,
    Extent,
    Model,
    Rewinding,
    RewindKind,
    SavedState,
)
from outrider.core.data import Logits, Span
from outrider.costs.calibrate import ordinary_tokens

REWINDINGS = {rewinding.kind: rewinding for rewinding in (FREE, WINDOW, CHECKPOINTS, UNABLE)}
MAX_TURNS, LAST_TURNS = 12, 5
"""Copies of a sequence's states from where a conversation turns, and how many of them are the last ones."""

Keep = Callable[[int, Bytes | None], Bytes | None]
"""Copies a sequence's state, into an older copy where that fits, or gives None where it cannot."""
Put = Callable[[int, Bytes], bool]
"""Gives a copy to a sequence, and says whether that was possible."""


class Rewinder:
    """Keeps what going back takes, and knows how far it reaches. A model tells it of its calls, and of what
    became of its sequences.

    Copies of states are from where conversations turn: of each sequence the first, the last ones, and between
    these some that lie apart. A recurrent state has one more, from before its last draft, which the next is
    written over. The others are never written to: sequences, and copies of these, share them.

    Args:
        max_bytes: Of all copies together.
        window_tokens: How far the KV that is kept reaches back; 0: it is kept whole.
        oldest: The first position that a sequence stores; negative for none.
        is_copied: Copies of a sequence hold what is outside of its window, too.
    """

    def __init__(
        self,
        rewinding: Rewinding,
        states: tuple[Keep, Put] | None = None,
        *,
        max_bytes: float = UNLIMITED,
        window_tokens: int = 0,
        oldest: Callable[[int], int] = lambda _sequence: 0,
        is_copied: bool = True,
    ) -> None:
        self.rewinding = rewinding
        self._states, self._max_bytes = states, max_bytes
        self._window_tokens, self._oldest, self._is_copied = window_tokens, oldest, is_copied
        self._turns: dict[int, dict[int, Bytes]] = {}
        """by sequence and length, in ascending order"""
        self._drafts: dict[int, tuple[int, Bytes]] = {}

    def before_call(self, spans: Sequence[Span]) -> None:
        """Copy the states that a call is about to change, as far as it asks for that."""
        if self._states is None:
            return
        keep, _ = self._states
        for span in spans:
            turns = self._turns.setdefault(span.sequence, {})
            is_new = span.is_turn and span.start not in turns
            if is_new and (state := keep(span.sequence, None)) is not None:
                turns[span.start] = state
                self._thin(turns)
            # Of a sequence that just went back, or turns, it is there.
            is_needed = span.checkpoint and self.rewinding.recomputes
            if is_needed and span.start not in self._copies(span.sequence):
                _, older = self._drafts.pop(span.sequence, (0, None))
                if (state := keep(span.sequence, older)) is not None:
                    self._drafts[span.sequence] = span.start, state

    def _thin(self, turns: dict[int, Bytes]) -> None:
        if len(turns) > MAX_TURNS:
            _drop_one(turns)
        while self._num_bytes() > self._max_bytes:
            _drop_one(max(self._turns.values(), key=len))

    def _num_bytes(self) -> int:
        states = (state for turns in self._turns.values() for state in turns.values())
        return sum({id(state): state.nbytes for state in states}.values())

    def _copies(self, sequence: int) -> dict[int, Bytes]:
        draft = self._drafts.get(sequence)
        return self._turns.get(sequence, {}) | ({} if draft is None else dict([draft]))

    def _fewest(self, sequence: int) -> int:
        """The fewest tokens that a sequence can be cut to: those that the next one looks back at are stored.
        There are no gaps, so the oldest position is enough to know."""
        if self.rewinding.recomputes or not self.rewinding.is_possible:
            return UNLIMITED
        if not self._window_tokens:
            return 0
        oldest = self._oldest(sequence)
        return oldest + self._window_tokens - 1 if oldest > 0 else -oldest * UNLIMITED

    def reach(self, sequence: int, length: int) -> int:
        """The most tokens, `length` at most and fewer than are stored, that a sequence can go back to."""
        if length >= self._fewest(sequence):
            return length
        return max((at for at in self._copies(sequence) if at <= length), default=0)

    def can_copy(self, source: int, stored: int, length: int) -> bool:
        """Whether another sequence can take over the first `length` of the `stored` tokens. Of a window the
        library lets go of no cell that two sequences share."""
        is_there = length == stored or self.reach(source, length) == length
        return self.rewinding.copies_beginnings and is_there

    def put_back(self, source: int, length: int, sequence: int) -> bool:
        """Give a sequence the state beside the KV that `source` had after `length` tokens; False where that
        failed."""
        if length >= self._fewest(source):
            return True
        state = self._copies(source).get(length)
        return self._states is not None and state is not None and self._states[1](sequence, state)

    def truncated(self, sequence: int, length: int) -> None:
        """A sequence went back to `length` tokens."""
        turns = self._turns.pop(sequence, {})
        if length:
            self._turns[sequence] = {at: state for at, state in turns.items() if at <= length}
        if not 0 < self._drafts.get(sequence, (0, None))[0] <= length:
            self._drafts.pop(sequence, None)

    def copied(self, source: int, sequence: int, length: int) -> None:
        """An empty sequence took over the first `length` tokens of another."""
        turns = self._turns.get(source, {})
        self._turns[sequence] = {at: state for at, state in turns.items() if at <= length}

    def save(self, sequence: int, stored: int) -> tuple[Extent, list[Bytes]]:
        """How far a copy of a sequence will reach, and the states that go with it."""
        states = dict(self._turns.get(sequence, {}))
        at, state = self._drafts.get(sequence, (0, None))
        if state is not None and at:
            states[at] = state.copy()  # it is written over
        # Of what is not copied whole, no more is there than the next token looks back at.
        cut_from = stored - 1 if not self._is_copied and 0 < self._window_tokens < stored else 0
        any_from = min(stored, max(self._fewest(sequence), cut_from))
        return Extent(stored, any_from, tuple(sorted(states))), [states[at] for at in sorted(states)]

    def restored(self, sequence: int, saved: SavedState) -> None:
        """An empty sequence got a copy."""
        self._turns[sequence] = dict(zip(saved.extent.checkpoints, saved.states, strict=True))


def _drop_one(turns: dict[int, Bytes]) -> None:
    """The one that lies nearest to its predecessor, but the first and the last ones."""
    lengths = list(turns)
    between = range(1, max(len(lengths) - LAST_TURNS, 2)) if len(lengths) > 1 else range(1)
    del turns[lengths[min(between, key=lambda i: lengths[i] - lengths[i - 1])]]


@dataclass(frozen=True, slots=True)
class RewindSupport:
    """How contexts of some weights go back; `state_bytes`: the recurrent state of a sequence; `notice`: why
    there is no way."""

    kind: RewindKind
    state_bytes: int = 0
    notice: str | None = None

    @property
    def rewinding(self) -> Rewinding:
        return REWINDINGS[self.kind]

    def line(self, target: Model) -> str | None:
        """What it takes to reject drafts of a recurrent target, or why that cannot be."""
        if target.rewinding.kind != "checkpoints":
            return self.notice
        size = f"{2 * self.state_bytes * target.max_sequences / 1e6:,.1f} MB"
        return (
            f"{target.name} takes rejected drafts back by checkpoints of its recurrent state ({size}): "
            "accepted tokens of a rejected draft are evaluated twice (docs/backends.md)"
        )


MAX_DIFFERENCE = 0.3
"""in parts of the difference between the logits of two positions. Rounding by another size of call makes less
than 0.1 (delta-net layers in two orders of summation: 0.04 to 0.05); a state that holds a token too many
differs by about 1."""


def difference_after_rewind(model: Model) -> float:
    """The difference that going back leaves in the logits, in parts of that between two positions: after a
    call in several parts and one in a single part, twice in a row, beside another sequence."""
    ordinary = dict.fromkeys(ordinary_tokens(model.vocabulary, Random(0)))
    tokens = tuple(islice(cycle(ordinary), 28))
    text, wrong = tokens[:20], tokens[20:]
    model.decode([Span(0, text[:4], 0, 0), Span(1, wrong, 0, 0)])
    rows = [*_went_back(model, text[:13], 9, wrong[:4])]
    rows += _went_back(model, text[:18], 5, wrong[:2])
    rows += _went_back(model, text, 2, ())
    model.truncate(1, 0)
    [expected] = model.decode([Span(1, text, 0, len(text))])
    between = _distance(expected[5:], expected[4:-1])
    return _distance(np.array(rows), expected[4:]) / between if between else np.inf


def _went_back(model: Model, text: tuple[int, ...], num_rows: int, wrong: tuple[int, ...]) -> list[Logits]:
    """The last rows of a text whose first tokens are stored, evaluated with wrong tokens after it, which are
    taken back."""
    stored = model.length(0)
    tokens = (*text[stored:], *wrong)
    [rows] = model.decode([Span(0, tokens, stored, num_rows + len(wrong), checkpoint=bool(wrong))])
    kept = [row.copy() for row in rows[:num_rows]]
    model.truncate(0, model.reach(0, len(text)))
    return kept


def _distance(a: Logits, b: Logits) -> float:
    """Root mean square of the differences; infinite where something is no number."""
    distance = float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))
    return distance if np.isfinite(distance) else np.inf
