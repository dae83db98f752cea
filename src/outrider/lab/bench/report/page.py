"""The HTML report: one file that needs no network and no other file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.core import numbers
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench.figures import Best, best
from outrider.lab.bench.report import words
from outrider.lab.bench.report.pictures import PICTURES, Picture
from outrider.lab.bench.results import Results

_LONGEST_BOUND = 2.0
"""times its value: an interval that reaches farther is cut off, or it would make all bars short"""


def write_report(results: Results, path: Path) -> None:
    """Write the page to `path`, all of it or nothing. Raises SettingError where it cannot be written."""
    check_writable(path, "report")
    write_whole(path, page(results), "report")


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
    drawn = [make(results) for make in PICTURES]
    return _rendered(
        "page.html",
        results,
        where=f"{results.head.machine.get('cpu', 'unknown processor')}, started {results.head.started}",
        targets=_targets(results),
        notes=[*words.notes(results), *(made for made in drawn if isinstance(made, str))],
        pictures=[made for made in drawn if isinstance(made, Picture)],
        measured=words.measured(results),
        method=words.METHOD,
        setup=[
            words.skipped(results),
            words.facts("Machine and builds", results.head.machine),
            words.models(results),
            words.facts("Plan", results.head.plan),
        ],
    )


def _targets(results: Results) -> list[dict[str, Any]]:
    commands = {choice.ran.target: shlex.join(choice.command) for choice in words.choices(results)}
    found = []
    for target in results.targets:
        rows = _bars(results, target)
        pooled = [row for row in rows if row["workload"] == results.pooled and row["value"]]
        parts = {
            "target": target,
            "said": words.verdict(results, target),
            "command": commands.get(target, ""),
            "bars": pooled,
            "by_workload": [row for row in rows if row["workload"] != results.pooled and pooled],
        }
        found.append(parts)
    return found


def _bars(results: Results, target: str) -> list[dict[str, Any]]:
    """The chart that a report begins with: a bar for every pairing at its best setting, of all workloads
    together first, then of each. Its rows are those of a table, so that it is read, and heard, without the
    bars. Places on the axis are parts of its length, in percent; `one` is plain decoding's."""
    columns = results.columns_of(target)
    found = [best(results, target, draft, w) for w in results.pooled_first for draft in columns]
    speedups = [one.speedup for one in found if one.speedup]
    ends = [s.high if s.high < _LONGEST_BOUND * s.value else s.value for s in speedups]
    longest = max([1.25, *ends])

    def place(value: float) -> float:
        return round(100 * min(value / longest, 1.0), 1)

    return [
        {
            "workload": one.cell.workload,
            "cells": _cells(one),
            "kind": (one.outcome or "unknown") if one.is_measured else "predicted",
            "value": place(one.speedup.value) if one.speedup else 0.0,
            "low": place(one.speedup.low) if one.speedup else 0.0,
            "high": place(one.speedup.high) if one.speedup else 0.0,
            "one": place(1.0),
        }
        for one in found
    ]


def _cells(one: Best) -> dict[str, str]:
    said = one.outcome or "not known"
    return {
        "draft": words.draft_name(one.cell.draft),
        "workload": words.workload_name(one.cell.workload),
        "speed-up": numbers.speedup(one.speedup),
        "95 % interval": numbers.bounds(one.speedup),
        "verdict": said if one.is_measured or not one.speedup else f"≈ predicted: {said}",
        "setting": one.cell.setting or numbers.NOTHING,
        "plain tokens/s": numbers.rate(one.plain),
    }


def _words(text: str) -> Markup:
    """A sentence within HTML; a figure stays on a line with its percent sign."""
    return Markup(str(escape(numbers.printable(text))).replace(" %", "&nbsp;%"))
