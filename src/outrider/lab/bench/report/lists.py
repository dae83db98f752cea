"""The report's tables without a picture: everything measured, quality, models, what was skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.core import numbers
from outrider.lab.bench.report.tables import Table
from outrider.lab.bench.report.view import View, draft_name, workload_name
from outrider.lab.bench.summary import counts, speeds
from outrider.lab.bench.summary.predictions import predicted_speedup


def measured(view: View) -> Table:
    """Everything that ran for real, predicted beside measured."""
    rows = []
    for verdict in speeds.verdicts(view.results):
        cell = verdict.cell
        per_call = counts.tokens_per_target_call(view.results, cell)
        row = {
            "target": cell.target,
            "backend": view.results.backend(cell.target) or numbers.NOTHING,
            "draft": draft_name(cell.draft),
            "workload": workload_name(cell.workload),
            "setting": cell.setting,
            "tokens/s": numbers.rate(speeds.measured_speed(view.results, cell)),
            "predicted": numbers.speedup(predicted_speedup(view.results, cell)),
            "measured": numbers.speedup(verdict.speedup),
            "95 % interval": numbers.bounds(verdict.speedup),
            "tokens a target call": numbers.NOTHING if per_call is None else f"{per_call:.2f}",
            "verdict": verdict.outcome,
        }
        rows.append(row)
    figures = ("tokens/s", "predicted", "measured", "tokens a target call")
    return Table("Everything that ran for real", rows, figures=figures)


def quality(view: View) -> Table:
    """What each quantization of a target costs in quality, and its size."""
    rows = []
    for target in view.results.targets:
        model = view.results.model(target, "target")
        if found := counts.quality_of(view.results, target):
            row = {
                "target": target,
                "against": found.reference,
                "mean KL, nats": f"{found.mean_kl:.4f}",
                "top-1 agreement": numbers.percent(found.top1_agreement, 1),
                "tokens": f"{found.num_tokens:,}",
                "file": numbers.gigabytes(model.file_bytes if model else None),
            }
            rows.append(row)
    figures = ("mean KL, nats", "top-1 agreement", "tokens", "file")
    return Table("Quality of quantizations", rows, figures=figures)


def models(view: View) -> Table:
    """The files that took part, by their content."""
    rows = [
        {
            "model": row.model,
            "role": row.role,
            "backend": row.backend or numbers.NOTHING,
            "architecture": row.architecture,
            "quantization": row.quantization,
            "parameters": numbers.short_count(row.parameters),
            "of these active": numbers.short_count(row.active_parameters),
            "file": numbers.gigabytes(row.file_bytes),
            "memory": numbers.gigabytes(row.memory_bytes or None),
            "fingerprint": row.fingerprint,
            "load options": _plain(row.effective),
            "path": row.path,
        }
        for row in view.results.models
    ]
    return Table("Models", rows, figures=("parameters", "of these active", "file", "memory"))


def skipped(view: View) -> Table:
    """What takes no part, and why."""
    left_out = [(row.what, row.why) for row in view.results.skipped]
    left_out += [
        (f"{pair.draft} for {pair.target}", pair.why_not or "its tokenizer does not line up")
        for pair in view.results.pairs
        if not pair.usable
    ]
    return Table("What took no part", [{"what": what, "why": why} for what, why in left_out])


def machine(view: View) -> Table:
    """What was measured on, and with which builds."""
    return _facts("Machine and builds", view.results.head.machine)


def plan(view: View) -> Table:
    """What was asked for."""
    return _facts("Plan", view.results.head.plan)


def _facts(caption: str, facts: Mapping[str, Any]) -> Table:
    rows = [{"what": name.replace("_", " "), "value": _plain(value)} for name, value in facts.items()]
    return Table(caption, rows)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {_plain(part)}" for name, part in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or numbers.NOTHING
    if value is None:
        return numbers.NOTHING
    return value if isinstance(value, str) else json.dumps(value)
