"""Copies of a sequence's KV and state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from outrider.core.contracts import Model

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a copy: `length` tokens. A sequence restored from it can be truncated to any length from
    `any_from` on, and to its `checkpoints`."""

    length: int
    any_from: int
    checkpoints: tuple[int, ...] = ()

    def reach(self, length: int) -> int:
        """The longest prefix of `length` tokens that a restored sequence can be truncated to."""
        if length >= self.any_from:
            return min(length, self.length)
        return max((at for at in self.checkpoints if at <= length), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """A copy of one sequence, for models of the same kind: the parts of the sequence itself, then its states
    at the extent's checkpoints."""

    extent: Extent
    parts: tuple[Bytes, ...]

    @property
    def copies(self) -> tuple[Bytes, ...]:
        return self.parts[: len(self.parts) - len(self.extent.checkpoints)]

    @property
    def states(self) -> tuple[Bytes, ...]:
        return self.parts[len(self.parts) - len(self.extent.checkpoints) :]


@runtime_checkable
class SavingModel(Model, Protocol):
    """A Model whose sequences can be saved and restored."""

    @property
    def attends_to_all(self) -> bool:
        """Whether every stored sequence slows down the calls of all others."""

    def save(self, sequence: int) -> SavedState:
        """A copy of a sequence of at least one token. Raises RewindUnsupported if there can be none."""
        ...

    def restore(self, sequence: int, state: SavedState) -> None:
        """Restore an empty sequence from a copy made by a model with the same weights, library and options.
        Raises BackendError; the sequence then stays empty."""
        ...
