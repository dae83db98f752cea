"""How far a distillation is: one line on a terminal, plain ones now and then elsewhere; its end by Ctrl-C."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

from rich.console import Console

from outrider.cli.bench_progress import show_progress
from outrider.cli.interrupt import LoadInterrupt
from outrider.distill.run import Progress
from outrider.lab.progress import Progress as Shown

_TRAINING = "training"
_RECENT_S = 120.0
"""The time left follows the speed of so many last seconds: answers that were there already took none."""


class StepInterrupt(LoadInterrupt):
    """While a draft is trained, the first SIGINT waits for the step under way, which would be lost; a second
    one does not. Everywhere else it ends at once what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stepping = False

    def check(self) -> None:
        """Raise KeyboardInterrupt where a SIGINT waits."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_stepping and not self.requested:
            self.requested = True
        else:
            super()._note(number, frame)


class TimeLeft:
    """Seconds until a stage is over, by how fast it went lately."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._seen: deque[tuple[float, float]] = deque()

    def of(self, stage: str, part: float | None) -> float | None:
        """The estimate, given how far the stage is; None as long as there is none."""
        if stage != self._stage:
            self._stage = stage
            self._seen.clear()
        if part is None:
            return None
        now = self._clock()
        self._seen.append((now, part))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RECENT_S:
            self._seen.popleft()
        then, before = self._seen[0]
        return (now - then) / (part - before) * (1 - part) if part > before else None


@contextmanager
def show_distilling(
    errors: Console, interrupt: StepInterrupt, clock: Callable[[], float] = monotonic
) -> Iterator[Progress]:
    """Where to report how far it is, after every step: the time left is that of the stage alone."""
    left = TimeLeft(clock)
    with show_progress(errors, clock, by_stage=True) as show:

        def progress(stage: str, part: float | None, line: str = "") -> None:
            interrupt.is_stepping = stage == _TRAINING
            show(Shown(stage, part or 0.0, left.of(stage, part), line))
            interrupt.check()

        yield progress
