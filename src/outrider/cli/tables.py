"""Rows and tables for people: one look for all commands, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.output import readable

Cell = str | Text


def print_rows(
    console: Console, rows: Iterable[tuple[str, Cell]], *, width: int = 14, style: str = "bold"
) -> None:
    """A subject and what there is to say about it, a line each; an empty subject goes on with the last one.

    Args:
        console: Where to.
        rows: Subject and text; texts are folded beside their subjects.
        width: Columns for the subjects at least.
        style: That of the subjects.
    """
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
    """Columns under their names, `gap` apart: those named in `left` begin on the left, the others end on the
    right."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name in head:
        is_left = name in left
        table.add_column(name, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(table)


def print_notes(console: Console, notices: Iterable[str]) -> None:
    """What was switched off and why, and the like."""
    for notice in notices:
        console.print(Text(readable(f"note: {notice}"), style="yellow"))


def _cell(content: Cell) -> Text:
    return content if isinstance(content, Text) else Text(readable(content))
