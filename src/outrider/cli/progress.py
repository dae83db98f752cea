"""How far something is: bars on a terminal, which are gone at the end; a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from outrider.cli.output import readable

Report = Callable[[str, float], None]
"""Takes what is being done, and what part of it is."""

EVERY_S = 10.0
"""Lines of one stage are so far apart at least."""


@contextmanager
def bars(errors: Console, *, stacked: bool = False) -> Iterator[Report]:
    """A bar for what is being done, on standard error where that is a terminal. `stacked`: what was done
    before stays above it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, part: float) -> None:
            if what not in tasks:
                for task in tasks.values():
                    progress.update(task, completed=1.0, visible=stacked)
                tasks[what] = progress.add_task(escape(readable(what)), total=1.0)
            progress.update(tasks[what], completed=part, visible=True)

        yield report


class Ticker:
    """Says when a line is due: where its stage is new, or some time after the last one of that stage."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._last_s = 0.0

    def is_due(self, stage: str = "") -> bool:
        """Whether to write a line now; if so the time starts anew."""
        now_s = self._clock()
        if stage == self._stage and now_s - self._last_s < EVERY_S:
            return False
        self._stage, self._last_s = stage, now_s
        return True
