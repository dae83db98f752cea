"""Copies of what a model stores of a sequence, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a text a copy holds: `length` tokens. A sequence that gets it can be truncated to any
    number of them from `any_from` on, and to those of its `checkpoints`."""

    length: int
    any_from: int
    checkpoints: tuple[int, ...] = ()

    def reach(self, length: int) -> int:
        """The most tokens, `length` at most, that a sequence which gets the copy can be truncated to."""
        if length >= self.any_from:
            return min(length, self.length)
        return max((at for at in self.checkpoints if at <= length), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A copy of what a model stores of one sequence. The last of the `parts` are the states at the extent's
    checkpoints, those before them all of it, in order; only a model of the same kind can read them."""

    extent: Extent
    parts: tuple[Bytes, ...]

    @property
    def copies(self) -> tuple[Bytes, ...]:
        """All of the sequence."""
        return self.parts[: len(self.parts) - len(self.extent.checkpoints)]

    @property
    def states(self) -> tuple[Bytes, ...]:
        """Those at the checkpoints."""
        return self.parts[len(self.parts) - len(self.extent.checkpoints) :]


@runtime_checkable
class SavingModel(Model, Protocol):
    """A Model whose sequences can be copied out of it, and back later."""

    @property
    def attends_to_all(self) -> bool:
        """Whether what any sequence stores makes the calls of all others slower."""

    def save(self, sequence: int) -> SavedState:
        """A copy of all that a sequence stores, at least one token. Raises RewindUnsupported where there can
        be none."""
        ...

    def restore(self, sequence: int, state: SavedState) -> None:
        """Let an empty sequence hold what was saved: of this model, or of one with the same weights, library
        and options. Raises BackendError where that is impossible; the sequence is empty then."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FoundState:
    """A copy that holds a beginning of a text.

    Args:
        num_tokens: the tokens of the text that a sequence which gets it can go on from.
        state: the copy.
        source: what the store knows it by.
        tier: where it was, "memory" or "disk".
        read_s: the seconds that reading it from there took.
    """

    num_tokens: int
    state: SavedState
    source: object
    tier: str
    read_s: float

    @property
    def length(self) -> int:
        """All tokens that it holds."""
        return self.state.extent.length


class Reading(Protocol):
    """A copy that another thread reads from a slow place. As long as this is held the copy stays at hand, and
    nothing removes it from its place."""

    def done(self) -> bool:
        """Whether it has been read."""
        ...


class KvStore(Protocol):
    """Where texts go whose KV leaves a model, and come back from. Each cache namespace (`Request.scope`)
    finds its own alone. The engine's thread calls all of it."""

    def keep(self, sequence: int, scope: str, tokens: Sequence[int]) -> None:
        """Copy what a sequence stores: the first of these tokens. Nothing is done where that would not
        pay, or cannot be."""

    def find(self, scope: str, tokens: Sequence[int], held: int, max_length: int) -> FoundState | None:
        """The copy of `max_length` tokens at most that spares most time to a request which has the KV of
        `held` of these tokens already; None where evaluating them takes no longer."""

    def read_ahead(
        self, scope: str, tokens: Sequence[int], held: int, max_length: int, when_done: Callable[[], None]
    ) -> Reading | None:
        """Begin to read what `find` would wait for; another thread calls `when_done` at the end. None where
        `find` would not wait."""

    def texts(self, scope: str, tokens: Sequence[int]) -> list[list[int]]:
        """Those that begin with most of these tokens."""

    def restore(self, found: FoundState, sequence: int) -> bool:
        """Let an empty sequence hold all that was found. False where it turns out to be of no use; the
        sequence is empty then."""

    def note_read(self, num_tokens: int, seconds: float) -> None:
        """The model took so long to evaluate so many tokens of prompts."""

    def forget(self) -> None:
        """Forget all texts for good."""
