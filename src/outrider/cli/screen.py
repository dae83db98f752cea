"""Text for people: lines, rows, tables and progress, alike in all commands. Nothing shown can control the
terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from outrider.core.numbers import digits, duration, readable

Cell: TypeAlias = str | Text
Rows: TypeAlias = Iterable[tuple[str, Cell | Sequence[Cell] | None]]
"""Subjects, each with a text, several texts (a line each), or nothing (no row)."""

Report = Callable[..., None]
"""Takes what is being done, the part of it that is done (0 to 1; None: unknown), and a detail."""

_EVERY_S = 10.0
"""between lines about one stage"""
_RECENT_S = 120.0
_BAR_COLUMNS = 40


class Screen(Console):
    """Standard output for results or, with `stderr`, standard error for everything else."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=False, **options)

    def say(self, line: Cell, style: str = "") -> None:
        self.print(line if isinstance(line, Text) else Text(readable(line), style))

    def note(self, *notices: str) -> None:
        for notice in notices:
            self.say(f"note: {notice}", "yellow")

    def rows(self, rows: Rows, *, width: int = 14, style: str = "bold") -> None:
        """Subjects in `style`, in a column of `width` at least; texts are folded beside them."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style=style, no_wrap=True, min_width=width)
        table.add_column(overflow="fold")
        for name, said in rows:
            lines: Sequence[Cell] = [said] if isinstance(said, str | Text) else said or ()
            for line in lines:
                if line:
                    table.add_row(Text(name), _cell(line))
                    name = ""
        self.print(table)

    def table(
        self,
        head: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        left: Iterable[str] = (),
        gap: int = 2,
    ) -> None:
        """Columns under their names, `gap` apart; those named in `left` are aligned left, others right."""
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
        for name in head:
            side, folds = ("left", True) if name in left else ("right", False)
            table.add_column(name, justify=side, no_wrap=not folds, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*map(_cell, row))
        self.print(table)

    def calls(self, calls_s: Mapping[int, float], marks: Mapping[int, str] | None = None) -> None:
        """The times of calls by their tokens, with bars; `marks` follow the tokens."""
        longest, one_s = max(calls_s.values()), calls_s[1]
        block = "█" if "utf" in self.encoding.lower() else "#"
        rows: list[tuple[Cell, ...]] = []
        for size, seconds in calls_s.items():
            bar = Text(block * max(round(_BAR_COLUMNS * seconds / longest), 1), style="cyan")
            times = digits(1e3 * seconds), f"{seconds / one_s:.2f}", digits(1e3 * seconds / size)
            rows.append((f"{size}{(marks or {}).get(size, '')}", *times, bar))
        self.table(("tokens", "ms", "x one", "per token", ""), rows, left=("",))

    @contextmanager
    def progress(self, clock: Callable[[], float] = monotonic) -> Iterator[Report]:
        """Yields a function to report progress: a transient bar on a terminal; elsewhere a line for each
        stage whose parts are known, and another one now and then."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[more]}", style="dim"),
        )
        shown, told, told_s = "", "", 0.0
        with Progress(
            *columns,
            console=self,
            transient=True,
            disable=not self.is_terminal,
            get_time=clock,
            speed_estimate_period=_RECENT_S,
        ) as bar:

            def report(what: str, part: float | None = None, detail: str = "") -> None:
                nonlocal shown, told, told_s
                if what != shown:
                    for old in bar.task_ids:
                        bar.remove_task(old)
                    bar.add_task(escape(readable(what)), total=None, more="")
                    shown = what
                [task] = bar.tasks
                if part is not None:
                    bar.update(task.id, total=1.0, completed=part)
                left = f"{duration(task.time_remaining)} left" if task.time_remaining else ""
                more = ", ".join(filter(None, [left, readable(detail)]))
                bar.update(task.id, more=escape(more))
                is_due = what != told or clock() - told_s >= _EVERY_S
                if part is not None and is_due and not self.is_terminal:
                    told, told_s = what, clock()
                    self.say(f"{what}: {part:.0%}" + (f", {more}" if more else ""))

            yield report


def _cell(content: Cell) -> Text:
    return content if isinstance(content, Text) else Text(readable(content))
