"""The HTML report: one file that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from outrider.core import numbers
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench import figures
from outrider.lab.bench.figures import Best
from outrider.lab.bench.report import words
from outrider.lab.bench.report.words import Table
from outrider.lab.bench.results import Cell, Results
from outrider.lab.settings import Setting

_LONGEST_BOUND = 2.0
"""times its value: an interval that reaches farther is cut off, or it would make all bars short"""


def bars(values: Iterable[float]) -> list[float]:
    """Their lengths, in percent of the longest."""
    found = list(values)
    return [round(100 * value / max([*found, 1e-9]), 1) for value in found]


def acceptance(results: Results) -> Table:
    """By each drafter over all workloads, at its longest fixed draft that ran or was replayed."""
    rows, shares = list[dict[str, str]](), list[float]()
    for target, draft in [(t, d) for t in results.targets for d in results.columns_of(t)]:
        if (counts := _counts(results, target, draft)) is None:
            continue
        for place, (drafted, share) in enumerate(zip(counts.drafted, counts.ratios, strict=False), 1):
            row = {"target": target, "drafts by": draft or "lookup", "position": str(place)}
            rows.append(row | {"drafted": str(drafted), "accepted": numbers.percent(share, 1)})
            shares.append(share or 0.0)
    caption = "Acceptance by position: the share of tokens drafted there that were accepted"
    return Table(caption, rows, ("position", "drafted", "accepted"), bars(shares))


def _counts(results: Results, target: str, draft: str | None) -> figures.Acceptance | None:
    kind = "lookup" if draft is None else "model"
    known = [Setting.of(name) for name in results.settings(target, draft)]
    fixed = [s for s in known if s.drafters == kind and s.draft_max and not s.p_min]
    for setting in sorted(fixed, key=lambda s: s.draft_max or 0, reverse=True):
        found = figures.acceptance_by_position(results, Cell(target, draft, setting.name, None))
        if found and found.drafted:
            return found
    return None


_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


def costs(results: Results) -> Table:
    """What target calls cost by their tokens, and a draft step beside them."""
    rows, ratios = list[dict[str, str]](), list[float]()
    for row in [row for row in results.costs if row.role == "target"]:
        curve = row.costs()
        one_s = curve.call_s(1, context=0)
        drafts = [r for r in results.costs if r.role == "draft" and r.beside in (None, row.model)]
        calls = [("target call", size, curve.call_s(size, context=0)) for size in _SIZES]
        calls += [(f"step of {r.model}", 1, r.costs().call_s(1, context=0)) for r in drafts]
        for call, size, seconds in calls:
            ratios.append(seconds / one_s)
            shown = {"target": row.model, "call": call, "tokens": str(size)}
            shown |= {"time": numbers.milliseconds(seconds), "calls of one token": f"{ratios[-1]:.2f}"}
            rows.append(shown)
    caption = "What a call costs: where a longer one takes as long, longer drafts cost nothing"
    return Table(caption, rows, ("tokens", "time", "calls of one token"), bars(ratios))


def write_report(results: Results, path: Path) -> None:
    """Write the page to `path`, all of it or nothing. Raises SettingError where it cannot be written."""
    check_writable(path, "report")
    write_whole(path, page(results), "report")


def page(results: Results) -> str:
    """The whole document. The same rows give the same text."""
    environment = Environment(
        loader=PackageLoader("outrider.lab.bench", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"words": _words, "readable": numbers.readable}
    return environment.get_template("page.html").render(
        name=str(results.head.plan.get("name") or "sweep"),
        where=f"{results.head.machine.get('cpu', 'unknown processor')}, started {results.head.started}",
        targets=_targets(results),
        notes=words.notes(results),
        pictures={"acceptance": acceptance(results), "costs": costs(results)},
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
    commands = {choice.ran.target: choice.command for choice in words.choices(results)}
    found = []
    for target in results.targets:
        bars = _bars(figures.bests_of(results, target))
        pooled = [bar for bar in bars if bar["workload"] == results.pooled and bar["value"]]
        parts = {
            "target": target,
            "said": words.verdict(results, target),
            "command": commands.get(target, ""),
            "bars": pooled,
            "by_workload": [bar for bar in bars if bar["workload"] != results.pooled and pooled],
        }
        found.append(parts)
    return found


def _bars(found: Sequence[Best]) -> list[dict[str, Any]]:
    """The chart that a report begins with. Its rows are those of a table, so that it is read, and heard,
    without the bars. Places on the axis are parts of its length, in percent; `one` is plain decoding's."""
    speedups = [one.speedup for one in found if one.speedup]
    ends = [s.high if s.high < _LONGEST_BOUND * s.value else s.value for s in speedups]
    longest = max([1.25, *ends])

    def place(value: float) -> float:
        return round(100 * min(value / longest, 1.0), 1)

    return [
        {
            "workload": one.cell.workload,
            "cells": words.cells(one),
            "kind": (one.outcome or "unknown") if one.is_measured else "predicted",
            "value": place(one.speedup.value) if one.speedup else 0.0,
            "low": place(one.speedup.low) if one.speedup else 0.0,
            "high": place(one.speedup.high) if one.speedup else 0.0,
            "one": place(1.0),
        }
        for one in found
    ]


def _words(text: str) -> Markup:
    """A sentence within HTML; a figure stays on a line with its percent sign."""
    return Markup(str(escape(numbers.readable(text))).replace(" %", "&nbsp;%"))
