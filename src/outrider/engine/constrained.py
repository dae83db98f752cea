"""A request's constraint, with the time that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from outrider.core.contracts import Constraint
from outrider.core.data import Mask

_Answer = TypeVar("_Answer")


class Timed:
    """The Constraint of a request, which adds up the seconds of every question put to it."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._spent_s = 0.0

    def take_time(self) -> float:
        """The seconds since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return self._time(lambda: self._constraint.allowed(drafted))

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        return self._time(lambda: self._constraint.permits(drafted, tokens))

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return self._time(lambda: self._constraint.forced(drafted))

    def accept(self, tokens: Sequence[int]) -> None:
        self._time(lambda: self._constraint.accept(tokens))

    @property
    def is_complete(self) -> bool:
        return self._time(lambda: self._constraint.is_complete)

    @property
    def is_accepted(self) -> bool:
        return self._time(lambda: self._constraint.is_accepted)

    def _time(self, question: Callable[[], _Answer]) -> _Answer:
        before = perf_counter()
        try:
            return question()
        finally:
            self._spent_s += perf_counter() - before
