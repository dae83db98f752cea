"""A run's findings as plain data, for programs: what the report says, cell by cell."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.core.numbers import Interval
from outrider.lab.bench import figures
from outrider.lab.bench.report.words import choices
from outrider.lab.bench.results import Results

SCHEMA = "outrider.bench.summary/1"


def summary_json(results: Results, folder: Path, report: Path | None) -> dict[str, Any]:
    """The fastest setting of every cell with its speed-up, then how good predictions were and the time.

    A cell is a target, a draft (null: none) and a workload (null: all of them together). Speed-ups are
    ratios against plain decoding, with the bounds of their 95 % intervals; null is what did not run.
    """
    about = {
        "schema": SCHEMA,
        "folder": str(folder),
        "report": None if report is None else str(report),
    }
    if results.sheets:  # the same for each kind of machine
        sheets = {name: summary_json(sheet, folder, report) for name, sheet in results.sheets.items()}
        return about | {"machines": [{"name": name, **sheet} for name, sheet in sheets.items()]}
    error = figures.prediction_error(results)
    return about | {
        "machine": results.head.machine,
        "cells": [
            _cell(results, target, draft, workload)
            for target in results.targets
            for draft in results.columns
            for workload in (*results.workloads, None)
        ],
        "choices": [
            {
                "target": choice.ran.target,
                "backend": results.backend(choice.ran.target) or None,
                "draft": choice.ran.draft,
                "setting": choice.ran.setting,
                "tokens_per_s": _interval(choice.speed),
                "command": shlex.join(choice.command),
            }
            for choice in choices(results)
        ],
        "prediction_error": None if error is None else asdict(error),
        "model_s": figures.model_seconds(results),
        "skipped": [{"what": row.what, "why": row.why} for row in results.skipped],
    }


def _cell(results: Results, target: str, draft: str | None, workload: str | None) -> dict[str, Any]:
    # One workload is all of them.
    found = figures.best(results, target, draft, results.pooled if workload is None else workload)
    return {
        "target": target,
        "backend": results.backend(target) or None,
        "draft": draft,
        "workload": workload,
        "best_setting": found.cell.setting or None,
        "measured_speedup": _interval(found.speedup if found.is_measured else None),
        "outcome": found.outcome if found.is_measured else None,
        "predicted_speedup": _interval(figures.predicted_speedup(results, found.cell)),
        "plain_tokens_per_s": _interval(found.plain),
        "noise_ratio": _interval(figures.noise(results, target, found.cell.workload)),
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}
