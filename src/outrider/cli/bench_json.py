"""A run's findings as plain data, for programs: what the report says, cell by cell."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.results import Results
from outrider.bench.statistics import Interval
from outrider.bench.summary import (
    best_setting,
    measured_speedup,
    noise,
    outcome,
    plain_speed,
    predicted_speedup,
    prediction_error,
    time_saved,
)

__all__ = ["SCHEMA", "summary_json"]

SCHEMA = "outrider.bench.summary/1"


def summary_json(results: Results, folder: Path, report: Path | None) -> dict[str, Any]:
    """The best setting of every cell with its speed-up, then what predictions were worth and the time.

    A cell is a target, a draft (null: none) and a workload (null: all of them together). Speed-ups are
    ratios against plain decoding, with the bounds of their 95 % intervals; null is what did not run.
    """
    error, time = prediction_error(results), time_saved(results)
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "report": None if report is None else str(report),
        "machine": results.head.machine,
        "cells": [
            _cell(results, target, draft, workload)
            for target in results.targets
            for draft in _columns(results)
            for workload in (*results.workloads, None)
        ],
        "prediction_error": {
            "raw": None if error.raw is None else asdict(error.raw),
            "anchored": None if error.anchored is None else asdict(error.anchored),
        },
        "time": asdict(time) | {"took_s": time.took_s, "took_ratio": time.took_ratio},
        "skipped": [{"what": row.what, "why": row.why} for row in results.skipped],
    }


def _columns(results: Results) -> list[str | None]:
    """The drafts, and none where targets were swept without one too."""
    alone: list[str | None] = [None] if results.head.plan.get("lookup_only", True) else []
    return [*alone, *results.drafts]


def _cell(results: Results, target: str, draft: str | None, workload: str | None) -> dict[str, Any]:
    best = best_setting(results, target, draft, workload)
    measured = measured_speedup(results, target, draft, best, workload)
    quiet = noise(results, target, workload)
    return {
        "target": target,
        "draft": draft,
        "workload": workload,
        "best_setting": best,
        "measured_speedup": _interval(measured),
        "outcome": None if measured is None else outcome(measured, quiet),
        "predicted_speedup": _interval(predicted_speedup(results, target, draft, best, workload)),
        "plain_tokens_per_s": _interval(plain_speed(results, target, workload)),
        "noise_ratio": _interval(quiet),
    }


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}
