"""The report's tables of texts: everything measured, models, what was skipped, machine and plan."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core import numbers
from outrider.lab.bench import figures
from outrider.lab.bench.report.words import draft_name, workload_name
from outrider.lab.bench.results import Results


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain texts by column, all with the same columns; those in `figures` are aligned right."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    figures: Collection[str] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Their heads; none where there are no rows."""
        return tuple(self.rows[0]) if self.rows else ()


def measured(results: Results) -> Table:
    """Everything that ran for real, predicted beside measured."""
    rows = []
    for verdict in figures.verdicts(results):
        cell = verdict.cell
        per_call = figures.tokens_per_target_call(results, cell)
        row = {
            "target": cell.target,
            "backend": results.backend(cell.target) or numbers.NOTHING,
            "draft": draft_name(cell.draft),
            "workload": workload_name(cell.workload),
            "setting": cell.setting,
            "tokens/s": numbers.rate(figures.measured_speed(results, cell)),
            "predicted": numbers.speedup(figures.predicted_speedup(results, cell)),
            "measured": numbers.speedup(verdict.speedup),
            "95 % interval": numbers.bounds(verdict.speedup),
            "tokens a target call": numbers.NOTHING if per_call is None else f"{per_call:.2f}",
            "verdict": verdict.outcome,
        }
        rows.append(row)
    right = ("tokens/s", "predicted", "measured", "tokens a target call")
    return Table("Everything that ran for real", rows, right)


def models(results: Results) -> Table:
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
        for row in results.models
    ]
    return Table("Models", rows, ("parameters", "of these active", "file", "memory"))


def skipped(results: Results) -> Table:
    """What takes no part, and why."""
    left_out = [(row.what, row.why) for row in results.skipped]
    left_out += [
        (f"{pair.draft} for {pair.target}", pair.why_not or "its tokenizer does not line up")
        for pair in results.pairs
        if not pair.usable
    ]
    return Table("What took no part", [{"what": what, "why": why} for what, why in left_out])


def facts(caption: str, values: Mapping[str, Any]) -> Table:
    """What was measured on, or what was asked for."""
    rows = [{"what": name.replace("_", " "), "value": _plain(value)} for name, value in values.items()]
    return Table(caption, rows)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {_plain(part)}" for name, part in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or numbers.NOTHING
    if value is None:
        return numbers.NOTHING
    return value if isinstance(value, str) else json.dumps(value)
