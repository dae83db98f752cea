"""What changed between two runs of a sweep, beyond the noise; and what makes them hard to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.bench.results import Cell, Results, rates
from outrider.bench.summary.speeds import (
    Outcome,
    combined_noise,
    measured_speed,
    measured_speedup,
    noise,
    outcome,
    paired,
)
from outrider.lab.numbers import NOTHING, printable
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import LEVEL, Estimate, Interval, estimate, holm

PROCESS_NOISE_RATIO = 0.09
"""Two processes of the same program differ by up to so much in plain speed (docs/method.md)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that both runs measured. `ratio` is after over before, over the cases that both have."""

    cell: Cell
    figure: Literal["speed-up", "tokens/s"]
    """"tokens/s": of plain decoding"""
    before: Interval
    after: Interval
    ratio: Interval
    noise: Interval | None
    outcome: Outcome
    """"tie": no change beyond the noise, among all that were looked at"""


def changes(before: Results, after: Results) -> list[Change]:
    """Every cell of one workload that ran in both, plain decoding's speed first. By Holm's procedure the
    chance that any change that is reported is none is at most 5 %."""
    after = _called_alike(before, after)
    found: list[tuple[Cell, Estimate, Interval | None]] = []
    shared = [cell for cell in before.runs_by_cell if cell in after.runs_by_cell]
    for cell in sorted(shared, key=lambda cell: cell.setting != PLAIN.name):
        compared = _compared(cell, before, after)
        if compared is not None:
            found.append((cell, compared, _noise(cell, before, after)))
    picked = holm([compared.p_value for _, compared, _ in found], 1 - LEVEL)
    changed = []
    for (cell, compared, own_noise), is_picked in zip(found, picked, strict=True):
        said: Outcome = outcome(compared.interval, own_noise) if is_picked else "tie"
        sides = [_figure(results, cell) for results in (before, after)]
        if sides[0] is not None and sides[1] is not None:
            figure: Literal["speed-up", "tokens/s"] = "tokens/s" if cell.is_plain else "speed-up"
            changed.append(Change(cell, figure, sides[0], sides[1], compared.interval, own_noise, said))
    return changed


def differences(before: Results, after: Results) -> list[str]:
    """What else is not the same in two runs, one line each: machine, build, models, plan, what ran."""
    after = _called_alike(before, after)
    lines = [
        *_unlike("machine", before.head.machine, after.head.machine),
        *_unlike("plan", before.head.plan, after.head.plan),
    ]
    prints = [{row.model: row.fingerprint for row in results.models} for results in (before, after)]
    for name in sorted(prints[0].keys() & prints[1].keys()):
        if prints[0][name] != prints[1][name]:
            lines.append(f"model {name}: another file ({prints[0][name]} / {prints[1][name]})")
    lines += _other_prompts(before, after)
    for only, there, gone in (("first", before, after), ("second", after, before)):
        cells = [cell for cell in there.runs_by_cell if cell not in gone.runs_by_cell]
        if cells:
            lines.append(f"only in the {only}: {_listed(map(_name, cells))}")
    return lines


def print_changes(before: Results, after: Results, console: Console) -> None:
    """Warnings, then a table of what changed, or the sentence that nothing did."""
    for line in differences(before, after):
        console.print(Text(printable(f"note: {line}"), style="yellow"))
    found = changes(before, after)
    if not found:
        console.print("Nothing ran in both.")
        return
    changed = [change for change in found if change.outcome != "tie"]
    if changed:
        console.print(_table(changed))
    if ties := len(found) - len(changed):
        where, figures = "In the rest no" if changed else "No", "figure" if ties == 1 else "figures"
        console.print(f"{where} change beyond the noise: {ties} {figures}.")


def _called_alike(before: Results, after: Results) -> Results:
    """The second run with its targets called as in the first: a run under several backends calls "model (ik)"
    what a run under one calls "model"."""
    known = {
        (row.fingerprint, row.backend): row.model
        for row in before.models
        if row.role == "target" and row.backend and row.model not in after.targets
    }
    others = [row for row in after.models if row.role == "target" and row.model not in before.targets]
    names = {
        row.model: known[row.fingerprint, row.backend]
        for row in others
        if (row.fingerprint, row.backend) in known
    }
    if not names:
        return after
    kinds = [field.name for field in fields(after) if field.name != "head"]
    renamed: dict[str, Any] = {
        kind: tuple(_called(row, names) for row in getattr(after, kind)) for kind in kinds
    }
    return replace(after, **renamed)


def _called(row: Any, names: Mapping[str, str]) -> Any:
    """A row with the targets in it renamed."""
    own = ["model"] if getattr(row, "role", "") == "target" else []
    found = {
        name: names[getattr(row, name)]
        for name in (*own, "target", "beside", "reference")
        if getattr(row, name, None) in names
    }
    return row.model_copy(update=found) if found else row


def _figure(results: Results, cell: Cell) -> Interval | None:
    if cell.is_plain:
        return measured_speed(results, cell)
    return measured_speedup(results, cell)


def _compared(cell: Cell, before: Results, after: Results) -> Estimate | None:
    """After over before, case by case."""
    sides = [_gains(results, cell) for results in (after, before)]
    cases = [(sides[0][case], sides[1][case]) for case in sides[0] if case in sides[1]]
    return estimate([cases], paired=False) if cases else None


def _gains(results: Results, cell: Cell) -> Mapping[str, Any]:
    """By case, of each repetition: plain decoding's tokens per second, or the speed-up in its block."""
    ours, plain = rates(results, cell), rates(results, cell.plain)
    strata = paired(results, cell, cell.plain)
    if strata is None:
        return {}
    names = [case for case in ours if case in plain and ours[case].keys() & plain[case].keys()]
    if cell.is_plain:
        return {case: 1 / rate for case, (_, rate) in zip(names, strata[0], strict=True)}
    return {case: first / rate for case, (first, rate) in zip(names, strata[0], strict=True)}


def _noise(cell: Cell, before: Results, after: Results) -> Interval | None:
    """Of both runs together; plain decoding's speed also differs between processes."""
    found = [noise(results, cell.target, cell.workload) for results in (before, after)]
    return combined_noise(found, PROCESS_NOISE_RATIO if cell.is_plain else 0.0)


def _other_prompts(before: Results, after: Results) -> list[str]:
    """Cases of one name are compared: those that were asked something else are not the same."""
    known = {(row.target, row.workload, row.case): row.prompt for row in before.answers}
    shared, others = Counter[str](), Counter[str]()
    for row in after.answers:
        if (prompt := known.get((row.target, row.workload, row.case))) is not None:
            shared[row.workload] += 1
            others[row.workload] += prompt != row.prompt
    return [
        f"workload {name}: {n} of {shared[name]} cases have another prompt" for name, n in others.items() if n
    ]


def _unlike(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    keys = dict.fromkeys([*first, *second])
    return [
        f"{what}, {key}: {_short(first.get(key))} / {_short(second.get(key))}"
        for key in keys
        if first.get(key) != second.get(key)
    ]


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(cell: Cell) -> str:
    setting = cell.contestant or cell.setting
    return " × ".join(part for part in (cell.target, cell.draft, setting, cell.workload) if part)


def _names(cell: Cell) -> tuple[str, str, str, str]:
    """Target, draft, setting and workload. Which draft another engine has is not known."""
    draft = NOTHING if cell.contestant else cell.draft or "none"
    return cell.target, draft, cell.contestant or cell.setting, cell.workload or "all"


def _listed(names: Iterable[str], most: int = 3) -> str:
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _table(found: Sequence[Change]) -> Table:
    table = Table("target", "draft", "setting", "workload", "figure", box=None, pad_edge=False)
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    for change in found:
        cell, ratio = change.cell, change.ratio
        low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
        table.add_row(
            *(Text(printable(name)) for name in _names(cell)),
            change.figure,
            f"{change.before.value:.2f}",
            f"{change.after.value:.2f}",
            f"{100 * (ratio.value - 1):+.1f} % ({low:+.1f} to {high:+.1f})",
        )
    return table
