"""Copies of what a model stores of a sequence."""

from __future__ import annotations

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
