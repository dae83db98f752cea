"""The report in the terminal: a table for each target, and the sentences beneath."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from outrider.core import numbers
from outrider.lab.bench.report import lists, words
from outrider.lab.bench.report.choice import choices
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View
from outrider.lab.bench.results import Results

_STYLES = {"faster": "green", "slower": "red", "tie": "yellow", "unsettled": "cyan"}


def print_report(results: Results, console: Console) -> None:
    """Print what a run found; it fits 80 columns, and says everything without colour."""
    for name, sheet in results.sheets.items():
        _say(console, f"\nOn {name}", "bold underline")
        _print_sheet(sheet, console)
    if len(results.sheets) > 1:
        _say(console, "\nWhat wins on each machine", "bold underline")
        for name, said in words.winners(results):
            _say(console, f"On {name}: {said}")
    if not results.sheets:
        _print_sheet(results, console)


def _print_sheet(results: Results, console: Console) -> None:
    view = View(results)
    for target in results.targets:
        _say(console, f"\n{target}", "bold")
        if view.pooled_first:
            console.print(_best(view, target))
        _say(console, " ".join(words.verdict(view, target)))
    if not results.targets:
        _say(console, "Nothing was measured yet.")
    for choice in choices(view):
        _say(console, f"\n{words.taken(choice)}")
        _say(console, _wrapped(choice.command, console.width))
    for table in (lists.quality(view), lists.skipped(view)):
        if table.rows:
            _say(console, f"\n{table.caption}", "bold")
            console.print(_rich(table))
    console.print()
    for line in words.notes(view):
        _say(console, line)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text("\n".join(map(numbers.printable, text.split("\n"))), style=style))


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


def _best(view: View, target: str) -> RichTable:
    """Draft by workload: the fastest setting, by how much, and whether that means anything."""
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("draft", overflow="fold", max_width=32)
    table.add_column("workload", overflow="fold")
    table.add_column("plain\ntokens/s", justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold")
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("95 %", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for draft in view.columns_of(target):
        cells = [view.best(target, draft, workload) for workload in view.pooled_first]
        for place, cell in enumerate(cells):
            is_predicted = cell.speedup is not None and not cell.is_measured
            said = cell.outcome or "not known"
            plain = [
                (draft or "none") if place == 0 else "",
                cell.workload or "all",
                numbers.rate(cell.plain),
                cell.setting or numbers.NOTHING,
            ]
            styled = [
                ("≈ " if is_predicted else "") + numbers.speedup(cell.speedup),
                "predicted" if is_predicted else numbers.bounds(cell.speedup).replace(" to ", "–"),
                said,
            ]
            texts = [Text(numbers.printable(text)) for text in plain]
            texts += [Text(numbers.printable(text), style=_STYLES.get(said, "dim")) for text in styled]
            table.add_row(*texts, end_section=place == len(cells) - 1)
    return table


def _rich(table: Table) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns:
        made.add_column(column, justify="right" if column in table.figures else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(numbers.printable(cell)) for cell in row.values()))
    return made
