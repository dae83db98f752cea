"""The report of a sweep: in the terminal a table for each target with sentences beneath, and one
self-contained HTML file with pictures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.core import numbers
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench.figures import best
from outrider.lab.bench.report.tables import skipped
from outrider.lab.bench.report.words import choices, notes, verdict, winners
from outrider.lab.bench.results import Results

_STYLES = {"faster": "green", "slower": "red", "tie": "yellow", "unsettled": "cyan"}


def write_report(results: Results, path: Path) -> None:
    """Write the HTML report to `path`, all of it or nothing: the same rows give the same bytes.

    Raises SettingError where it cannot be written.
    """
    from outrider.lab.bench.report.page import page  # drawing takes long to import

    check_writable(path, "report")
    write_whole(path, page(results), "report")


def print_report(results: Results, console: Console) -> None:
    """Print what a run found; it fits 80 columns, and says everything without colour."""
    for name, sheet in results.sheets.items():
        _say(console, f"\nOn {name}", "bold underline")
        _print_sheet(sheet, console)
    if len(results.sheets) > 1:
        _say(console, "\nWhat wins on each machine", "bold underline")
        for name, said in winners(results):
            _say(console, f"On {name}: {said}")
    if not results.sheets:
        _print_sheet(results, console)


def _print_sheet(results: Results, console: Console) -> None:
    for target in results.targets:
        _say(console, f"\n{target}", "bold")
        console.print(_pairings(results, target))
        _say(console, " ".join(verdict(results, target)))
    if not results.targets:
        _say(console, "Nothing was measured yet.")
    for choice in choices(results):
        _say(console, f"\nTo run {choice.ran.target}:")
        _say(console, _wrapped(choice.command, console.width))
    left_out = skipped(results)
    if left_out.rows:
        _say(console, f"\n{left_out.caption}", "bold")
        table = _table()
        for column in left_out.columns:
            table.add_column(column, overflow="fold")
        for row in left_out.rows:
            table.add_row(*map(_text, row.values()))
        console.print(table)
    console.print()
    for line in notes(results):
        _say(console, line)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text("\n".join(map(numbers.printable, text.split("\n"))), style=style))


def _text(text: str, style: str = "") -> Text:
    return Text(numbers.printable(text), style=style)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _wrapped(command: Sequence[str], width: int) -> str:
    """A command as a shell reads it, on as many lines as it takes."""
    lines = ["  " + shlex.quote(command[0])]
    for word in map(shlex.quote, command[1:]):
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append("    " + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _pairings(results: Results, target: str) -> Table:
    """Draft by workload: the fastest setting, by how much, and whether that means anything."""
    table = _table()
    table.add_column("draft", overflow="fold", max_width=32)
    table.add_column("workload", overflow="fold")
    table.add_column("plain\ntokens/s", justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold")
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("95 %", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for draft in results.columns_of(target):
        name = draft or "none"
        for workload in results.pooled_first:
            found = best(results, target, draft, workload)
            is_predicted = found.speedup is not None and not found.is_measured
            said = found.outcome or "not known"
            setting = found.cell.setting or numbers.NOTHING
            plain = [name, workload or "all", numbers.rate(found.plain), setting]
            styled = [
                ("≈ " if is_predicted else "") + numbers.speedup(found.speedup),
                "predicted" if is_predicted else numbers.bounds(found.speedup).replace(" to ", "–"),
                said,
            ]
            texts = [*map(_text, plain), *(_text(text, _STYLES.get(said, "dim")) for text in styled)]
            table.add_row(*texts, end_section=workload == results.pooled_first[-1])
            name = ""
    return table
