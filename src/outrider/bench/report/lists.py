"""The report's tables that stand for themselves: everything measured, quality, models, what was skipped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.bench.report.tables import Table
from outrider.bench.report.view import View, draft_name, workload_name
from outrider.bench.summary import counts, speeds
from outrider.bench.summary.verdicts import CellVerdict
from outrider.lab import numbers
from outrider.lab.rows import PairRow

__all__ = ["engines", "machine", "measured", "models", "plan", "quality", "skipped", "tokenizers"]

_FIGURES = ("tokens/s", "predicted", "measured", "tokens a target call")
_MEASURED = (
    *("target", "backend", "draft", "workload", "setting", *_FIGURES[:3]),
    *("95 % interval", _FIGURES[3], "verdict"),
)


def measured(view: View) -> Table:
    """Everything that ran for real, other engines too, predicted beside measured."""
    rows = [_measured(view, told) for told in view.verdicts]
    return Table.of("Everything that ran for real", _MEASURED, rows, figures=_FIGURES)


def engines(view: View) -> Table:
    """Of that, the other engines."""
    kept = ("target", "workload", "setting", "tokens/s", "measured", "95 % interval", "verdict")
    places = [_MEASURED.index(name) for name in kept]
    theirs = [_measured(view, told) for told in view.verdicts if told.cell.contestant is not None]
    rows = [[row[place] for place in places] for row in theirs]
    return Table.of("Other engines", kept, rows, figures=_FIGURES)


def _measured(view: View, told: CellVerdict) -> tuple[str, ...]:
    """A row of `measured`. Which draft another engine has only its own command or server knows."""
    cell = told.cell
    ours = cell.contestant is None
    predicted = view.predicted(cell) if ours else None
    speed = speeds.measured_speed(view.results, cell)
    per_call = counts.tokens_per_target_call(view.results, cell) if ours else None
    return (
        cell.target,
        (view.results.backend(cell.target) if ours else "") or numbers.NOTHING,
        draft_name(cell.draft) if ours else numbers.NOTHING,
        workload_name(cell.workload),
        cell.contestant or cell.setting,
        numbers.rate(speed),
        numbers.speedup(predicted),
        numbers.speedup(told.speedup),
        numbers.bounds(told.speedup),
        numbers.NOTHING if per_call is None else f"{per_call:.2f}",
        told.outcome,
    )


def quality(view: View) -> Table:
    """What each quantization of a target costs in quality, and its size."""
    rows = []
    for target in view.results.targets:
        found = counts.quality_of(view.results, target)
        model = view.results.model(target, "target")
        if found:
            rows.append(
                (
                    target,
                    found.reference,
                    f"{found.mean_kl:.4f}",
                    numbers.percent(found.top1_agreement, 1),
                    f"{found.num_tokens:,}",
                    numbers.gigabytes(model.file_bytes if model else None),
                )
            )
    figures = ("mean KL, nats", "top-1 agreement", "tokens", "file")
    return Table.of("Quality of quantizations", ("target", "against", *figures), rows, figures=figures)


def models(view: View) -> Table:
    """The files that took part, by their content."""
    rows = [
        (
            row.model,
            row.role,
            row.backend or numbers.NOTHING,
            row.architecture,
            row.quantization,
            f"{row.parameters / 1e6:,.0f} M" + _active(row.parameters, row.active_parameters),
            numbers.gigabytes(row.file_bytes),
            numbers.gigabytes(row.memory_bytes or None),
            row.fingerprint,
            _plain(row.effective),
            row.path,
        )
        for row in view.results.models
    ]
    figures = ("parameters", "file", "memory")
    columns = (
        "model",
        "role",
        "backend",
        "architecture",
        "quantization",
        *figures,
        "fingerprint",
        "load options",
        "path",
    )
    return Table.of("Models", columns, rows, figures=figures)


def _active(parameters: int, active: int) -> str:
    return "" if active == parameters else f" ({active / 1e6:,.0f} M active)"


def tokenizers(view: View) -> Table:
    """How the tokenizers of each pair line up."""
    rows = [
        (
            row.target,
            row.draft,
            _lined_up(row),
            f"{row.common_tokens:,}",
            numbers.percent(row.text_ratio, 1),
            numbers.percent(row.cut_ratio, 1),
        )
        for row in view.results.pairs
    ]
    figures = ("common tokens", "of the text tokens", "sample text cut alike")
    columns = ("target", "draft", "tokenizers", *figures)
    return Table.of("Tokenizers of the pairs", columns, rows, figures=figures)


def _lined_up(row: PairRow) -> str:
    if row.identical:
        return "identical"
    if not row.usable:
        return f"not usable: {row.why_not or 'unknown'}"
    if row.reduced_from is not None:
        return f"reduced: the draft knows {row.common_tokens:,} of {row.reduced_from:,} tokens"
    return "usable"


def skipped(view: View) -> Table:
    """What takes no part, and why."""
    rows = [(row.what, row.why) for row in view.results.skipped]
    rows += [
        (f"{pair.draft} for {pair.target}", pair.why_not or "its tokenizer does not line up")
        for pair in view.results.pairs
        if not pair.usable
    ]
    return Table.of("What took no part", ("what", "why"), rows)


def machine(view: View) -> Table:
    """What was measured on, and with which builds."""
    return _facts("Machine and builds", view.results.head.machine)


def plan(view: View) -> Table:
    """What was asked for."""
    effective = {}
    for block in view.results.blocks:
        for name, value in block.effective.items():
            effective[f"in force: {name}"] = value
    return _facts("Plan", {**view.results.head.plan, **effective})


def _facts(caption: str, facts: Mapping[str, Any]) -> Table:
    rows: Iterable[tuple[str, str]] = [
        (name.replace("_", " "), _plain(value)) for name, value in facts.items()
    ]
    return Table.of(caption, ("what", "value"), rows)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) or numbers.NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(_plain(part) for part in value) or numbers.NOTHING
    if value is None:
        return numbers.NOTHING
    return value if isinstance(value, str) else json.dumps(value)
