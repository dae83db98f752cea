"""One running generation, as its caller holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from outrider.core.data import Completion, Request, StepRecord, Update
from outrider.core.errors import SettingError
from outrider.engine import Engine


class Generation:
    """A running generation: iterate over it for the text as it comes.

    `completion` is there when the iteration has ended; `parse` makes its `parsed` of a complete one.
    `cancel` ends it after the current step; so does leaving the loop early.
    """

    def __init__(
        self, engine: Engine, request: Request, parse: Callable[[Completion], Any] | None = None
    ) -> None:
        self._engine = engine
        self._parse = parse
        self._updates = engine.stream(request)
        self._request_id: int | None = None
        self._cancelled = False
        self._completion: Completion | None = None
        self.records: list[StepRecord] = []

    def __iter__(self) -> Iterator[Update]:
        try:
            while (update := self._next()) is not None:
                yield update
        except GeneratorExit:  # the loop was left: its place must not stay taken
            self.cancel()
            raise

    def _next(self) -> Update | None:
        try:
            update = next(self._updates)
        except StopIteration as end:
            self._completion = end.value or self._completion  # asked again, an ended generator has none
            if self._parse and self._completion and self._completion.is_complete:
                self._completion = replace(self._completion, parsed=self._parse(self._completion))
                self._parse = None
            return None
        self._request_id = update.record.request
        self.records.append(update.record)
        if self._cancelled:
            self._engine.cancel(self._request_id)
        return update

    def cancel(self) -> None:
        """End the generation after the current step (one that has not begun: after its first); its
        completion says "cancelled"."""
        self._cancelled = True
        if self._request_id is not None:
            self._engine.cancel(self._request_id)

    @property
    def completion(self) -> Completion:
        """The finished generation; runs it to its end first."""
        for _ in self:
            pass
        if self._completion is None:
            raise SettingError("generation", "it was broken off by an error", "Start another one.")
        return self._completion
