"""How far a sweep is: one line with the time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from outrider.cli.output import readable
from outrider.cli.progress import Ticker
from outrider.lab.progress import Progress


@contextmanager
def show_progress(
    errors: Console, clock: Callable[[], float] = monotonic, *, by_stage: bool = False
) -> Iterator[Callable[[Progress], None]]:
    """Where to report how far something is; a line every 10 s at most where `errors` is no terminal.

    `by_stage`: what is done is a part of its stage, not of all, and each stage has lines of its own.
    """
    if errors.is_terminal:
        columns = (
            TextColumn("{task.fields[stage]}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[detail]}", style="dim"),
        )
        with Bar(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("", total=1.0, stage="starting", left="", detail="")

            def show(now: Progress) -> None:
                stage, detail = escape(readable(now.stage)), escape(readable(now.detail))
                bar.update(task, completed=now.done, stage=stage, left=time_left(now.left_s), detail=detail)

            yield show
        return
    ticker = Ticker(clock)

    def write_line(now: Progress) -> None:
        if ticker.is_due(now.stage if by_stage else ""):
            done = f"{now.done:.0%}" if by_stage else f"{now.done:.0%} of all"
            subject = now.stage if by_stage and not now.done else f"{now.stage}: {done}"
            parts = [subject, time_left(now.left_s), now.detail]
            errors.print(Text(readable(", ".join(part for part in parts if part))))

    yield write_line


def time_left(seconds: float | None) -> str:
    """The time left for people; nothing where it is not known.

    >>> time_left(200), time_left(7500), time_left(9)
    ('3 min left', '2 h 05 min left', '9 s left')
    """
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s left"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min left" if hours else f"{minutes} min left"
