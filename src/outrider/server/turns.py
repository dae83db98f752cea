"""Engines that share a machine take turns: two that computed at once would slow each other down."""

from __future__ import annotations

from threading import Condition


class Turns:
    """A fair lock: waiters get it in order of arrival."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._next_ticket = 0
        self._serving = 0

    def __enter__(self) -> None:
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._changed.wait_for(lambda: self._serving == ticket)

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._serving += 1
            self._changed.notify_all()

    @property
    def is_wanted(self) -> bool:
        """Whether someone is waiting for it."""
        return self._next_ticket - self._serving > 1
