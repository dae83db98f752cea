"""A run's findings as plain data, for programs: what the report says, cell by cell."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.core.numbers import Interval
from outrider.lab.bench.report.choice import Choice, choices
from outrider.lab.bench.report.view import View
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary.counts import model_seconds
from outrider.lab.bench.summary.predictions import predicted_speedup
from outrider.lab.bench.summary.speeds import (
    best_setting,
    fastest,
    measured_speedup,
    noise,
    plain_speed,
    prediction_error,
    verdicts,
)

SCHEMA = "outrider.bench.summary/1"


def summary_json(results: Results, folder: Path, report: Path | None) -> dict[str, Any]:
    """The fastest setting of every cell with its speed-up, then how good predictions were and the time.

    A cell is a target, a draft (null: none) and a workload (null: all of them together). Speed-ups are
    ratios against plain decoding, with the bounds of their 95 % intervals; null is what did not run. Outcomes
    are given for all cells together, so that none is a lucky one of many.
    """
    if results.sheets:  # the same for each kind of machine
        sheets = {name: summary_json(sheet, folder, report) for name, sheet in results.sheets.items()}
        return {
            "schema": SCHEMA,
            "folder": str(folder),
            "report": None if report is None else str(report),
            "machines": [{"name": name, **sheet} for name, sheet in sheets.items()],
        }
    error = prediction_error(results)
    cells = [
        _fastest(results, target, draft, workload)
        for target in results.targets
        for draft in _columns(results)
        for workload in (*results.workloads, None)
    ]
    only = results.workloads[0] if len(results.workloads) == 1 else None
    named = [cell._replace(workload=cell.workload or only) for cell in cells]  # one workload is all of them
    outcomes = {found.cell: found.outcome for found in verdicts(results, list(dict.fromkeys(named)))}
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "report": None if report is None else str(report),
        "machine": results.head.machine,
        "cells": [_cell(results, cell, outcomes.get(same)) for cell, same in zip(cells, named, strict=True)],
        "choices": [_choice(choice) for choice in choices(View(results))],
        "prediction_error": None if error is None else asdict(error),
        "model_s": model_seconds(results),
        "skipped": [{"what": row.what, "why": row.why} for row in results.skipped],
    }


def _columns(results: Results) -> list[str | None]:
    """The drafts, and none where targets were swept without one too."""
    alone: list[str | None] = [None] if results.head.plan.get("lookup_only", True) else []
    return [*alone, *results.drafts]


def _fastest(results: Results, target: str, draft: str | None, workload: str | None) -> Cell:
    """Of the settings that ran the fastest, be it slower than plain decoding; of those that were replayed
    where none ran, "plain" where none of these is faster."""
    best, _, is_measured = fastest(results, target, draft, workload)
    name = best if is_measured else best_setting(results, target, draft, workload)
    return Cell(target, draft, name, workload)


def _cell(results: Results, cell: Cell, outcome: str | None) -> dict[str, Any]:
    return {
        "target": cell.target,
        "backend": results.backend(cell.target) or None,
        "draft": cell.draft,
        "workload": cell.workload,
        "best_setting": cell.setting,
        "measured_speedup": _interval(measured_speedup(results, cell)),
        "outcome": outcome,
        "predicted_speedup": _interval(predicted_speedup(results, cell)),
        "plain_tokens_per_s": _interval(plain_speed(results, cell.target, cell.workload)),
        "noise_ratio": _interval(noise(results, cell.target, cell.workload)),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    """What to run a file with; `gain` is over the best under another backend (null: there is none)."""
    return {
        "target": choice.ran.target,
        "backend": choice.backend or None,
        "draft": choice.ran.draft,
        "setting": choice.ran.setting,
        "tokens_per_s": _interval(choice.speed),
        "rival": None if choice.rival is None else choice.rival.ran.target,
        "gain": _interval(choice.gain),
        "outcome": None if choice.gain is None else choice.outcome,
        "command": shlex.join(choice.command),
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}
