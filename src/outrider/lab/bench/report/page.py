"""The HTML report: one file that needs no network and no other file."""

from __future__ import annotations

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.core import numbers
from outrider.lab.bench.report import lists, words
from outrider.lab.bench.report.bars import bars
from outrider.lab.bench.report.choice import choices
from outrider.lab.bench.report.pictures import PICTURES
from outrider.lab.bench.report.pictures.picture import Missing, Picture
from outrider.lab.bench.report.view import View
from outrider.lab.bench.results import Results

_SETUP = (lists.quality, lists.skipped, lists.machine, lists.models, lists.plan)


def page(results: Results) -> str:
    """The whole document. The same rows give the same text. Of a sweep over several kinds of machines a page
    with a sheet for each, which is a page of its own within it."""
    if len(results.sheets) < 2:
        return _sheet(next(iter(results.sheets.values()), results))
    sheets = {name: _sheet(sheet) for name, sheet in results.sheets.items()}
    return _rendered("sheets.html", results, winners=words.winners(results), sheets=sheets)


def _rendered(template: str, results: Results, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("outrider.lab.bench", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": _words, "printable": numbers.printable}
    name = str(results.head.plan.get("name") or "sweep")
    return environment.get_template(template).render(name=name, **values)


def _sheet(results: Results) -> str:
    view = View(results)
    drawn = [make(view) for make in PICTURES]
    return _rendered(
        "page.html",
        results,
        where=f"{results.head.machine.get('cpu', 'unknown processor')}, started {results.head.started}",
        targets=_targets(view),
        notes=words.notes(view),
        pictures=[made for made in drawn if isinstance(made, Picture)],
        missing=[made for made in drawn if isinstance(made, Missing)],
        measured=lists.measured(view),
        method=words.METHOD,
        setup=[make(view) for make in _SETUP],
    )


def _targets(view: View) -> list[dict[str, Any]]:
    """Of each target what to do, the command, and the chart; a file under several libraries has one
    command."""
    commands = {choice.ran.target: choice for choice in choices(view)}
    found: list[dict[str, Any]] = []
    for target in view.results.targets:
        said, choice = words.verdict(view, target), commands.get(target)
        if choice is not None and choice.rival is not None:
            said = [words.taken(choice), *said]
        rows = bars(view, target)
        pooled = [row for row in rows if row.best.workload == view.pooled and row.best.speedup]
        others = [row for row in rows if row.best.workload != view.pooled and pooled]
        command = shlex.join(choice.command) if choice else ""
        parts = {"target": target, "said": said, "command": command, "bars": pooled, "by_workload": others}
        found.append(parts)
    return found


def _words(text: str) -> Markup:
    """A sentence within HTML; a figure stays on a line with its percent sign."""
    return Markup(str(escape(numbers.printable(text))).replace(" %", "&nbsp;%"))
