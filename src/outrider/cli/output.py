"""The standard streams, whatever the shell did to them, and text for people: rows, tables, notes, progress.

Nothing that is shown steers the terminal, and no write fails silently.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeAlias, cast

from outrider.core.errors import SettingError
from outrider.core.files import reason_of

if TYPE_CHECKING:  # rich loads slowly, and --help needs none of it
    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

PIPE_CLOSED = 141
"""Exit status after the reader of standard output has left, as shells have it."""

INCOMPLETE = 3
"""Exit status after an answer that is only the beginning of what its schema or grammar asks for."""

USAGE_ERROR = 2
"""Exit status after an error that the user can mend."""

# All but line breaks and tabs.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def readable(text: str) -> str:
    """The text without control characters: a model, a file name or a GGUF may hold any."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Write to standard output at once.

    Raises SettingError when it takes no more (a full disk), BrokenPipeError when its reader left.
    """
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write a value as one line of JSON; raises what `write` does."""
    write(json.dumps(value) + "\n")


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        way_out = "Free some space, or send it elsewhere."
        raise SettingError("standard output", reason_of(error), way_out) from error


@contextmanager
def _nothing_to_say_it_on() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


class _Stream:
    """A standard stream, whoever writes to it (rich and typer do, too), with what becomes of its errors."""

    def __init__(self, stream: TextIO, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream = stream
        self._errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()


def _null(mode: str) -> TextIO:
    return cast(TextIO, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def open_streams() -> None:
    """Make the standard streams usable whatever the shell did to them."""
    if sys.stdin is None:
        sys.stdin = _null("r")
    if sys.stderr is None:
        sys.stderr = _null("w")
    if sys.stdout is None:
        sys.stderr.write("error: standard output: it is closed. Send it to a file, or to /dev/null.\n")
        sys.exit(USAGE_ERROR)
    # A terminal that lacks a character gets a question mark instead of a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if not isinstance(sys.stdout, _Stream):
        sys.stdout = cast(TextIO, _Stream(sys.stdout, _output_errors))
        sys.stderr = cast(TextIO, _Stream(sys.stderr, _nothing_to_say_it_on))


def let_rich_leave() -> None:
    """Let rich exit with 141 when its reader left: with 1 some commands say what they found."""
    from rich.console import Console

    Console.on_broken_pipe = lambda _: leave(PIPE_CLOSED)  # type: ignore[assignment,method-assign]


def leave(status: int) -> NoReturn:
    """Exit, dropping what the standard streams no longer take."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, SettingError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


# Rows and tables for people: one look for all commands, in 80 columns.

Cell: TypeAlias = "str | Text"


def print_rows(
    console: Console, rows: Iterable[tuple[str, Cell]], *, width: int = 14, style: str = "bold"
) -> None:
    """Subjects and what there is to say about them, a line each. An empty subject continues the last one.

    Args:
        console: Where to.
        rows: Subject and text; texts are folded beside their subjects.
        width: Columns for the subjects at least.
        style: That of the subjects.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for name, line in rows:
        table.add_row(Text(name), _cell(line))
    console.print(table)


def print_table(
    console: Console,
    head: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    left: Iterable[str] = (),
    gap: int = 2,
) -> None:
    """Columns under their names, `gap` apart. Those named in `left` are aligned left, the others right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name in head:
        is_left = name in left
        table.add_column(name, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table)


def print_notes(console: Console, notices: Iterable[str]) -> None:
    """Notices to the user, a line each."""
    from rich.text import Text

    for notice in notices:
        console.print(Text(readable(f"note: {notice}"), style="yellow"))


def _cell(content: Cell) -> Text:
    from rich.text import Text

    return content if isinstance(content, Text) else Text(readable(content))


# How far something is: bars on a terminal, which are gone at the end; a line now and then elsewhere.

Report = Callable[[str, float], None]
"""Takes what is being done, and the part of it that is done (0 to 1)."""

EVERY_S = 10.0
"""Lines of one stage are so far apart at least."""


@contextmanager
def bars(errors: Console, *, stacked: bool = False) -> Iterator[Report]:
    """A progress bar on standard error, where that is a terminal. With `stacked`, finished bars stay above
    it."""
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

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


@contextmanager
def bars_or_lines(errors: Console) -> Iterator[Report]:
    """Stacked bars on a terminal; elsewhere a line when a stage begins, and now and then."""
    if errors.is_terminal:
        with bars(errors, stacked=True) as report:
            yield report
        return
    ticker = Ticker()

    def write_line(what: str, part: float) -> None:
        if ticker.is_due(what):
            errors.print(f"{readable(what)}: {part:.0%}", markup=False)

    yield write_line


class Ticker:
    """Says when a line is due: for a new stage, or some time after the last line of the same stage."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._last_s = 0.0

    def is_due(self, stage: str = "") -> bool:
        """Whether to write a line now."""
        now_s = self._clock()
        if stage == self._stage and now_s - self._last_s < EVERY_S:
            return False
        self._stage, self._last_s = stage, now_s
        return True
