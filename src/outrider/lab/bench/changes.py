"""What changed between two runs of a sweep, beyond the noise; and what makes them hard to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary.speeds import (
    Outcome,
    combined_noise,
    measured_speed,
    measured_speedup,
    noise,
    outcome,
    shared_rates,
)
from outrider.lab.numbers import NOTHING, printable
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import LEVEL, Estimate, Floats, Interval, estimate, holm

PROCESS_NOISE_RATIO = 0.09
"""Two processes of the same program differ by up to so much in plain speed (docs/method.md)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that both runs measured. `ratio` is after over before, over the cases that both have."""

    cell: Cell
    before: Interval
    after: Interval
    ratio: Interval
    noise: Interval | None
    outcome: Outcome
    """"tie": no change beyond the noise, among all that were looked at"""

    @property
    def figure(self) -> Literal["speed-up", "tokens/s"]:
        """What is compared: the speed of plain decoding, or the speed-up of a setting."""
        return "tokens/s" if self.cell.is_plain else "speed-up"


def changes(before: Results, after: Results) -> list[Change]:
    """Every cell of one workload that ran in both, plain decoding's speed first. By Holm's procedure the
    chance that any change that is reported is none is at most 5 %."""
    after = _called_alike(before, after)
    found: list[tuple[Cell, Estimate, Interval | None]] = []
    shared = [cell for cell in before.runs_by_cell if cell in after.runs_by_cell]
    for cell in sorted(shared, key=lambda cell: cell.setting != PLAIN.name):
        first, second = _gains(before, cell), _gains(after, cell)
        if cases := [(second[case], first[case]) for case in second if case in first]:
            noises = [noise(results, cell.target, cell.workload) for results in (before, after)]
            # Plain decoding's speed also differs between processes.
            both = combined_noise(noises, PROCESS_NOISE_RATIO if cell.is_plain else 0.0)
            found.append((cell, estimate([cases], paired=False), both))
    picked = holm([compared.p_value for _, compared, _ in found], 1 - LEVEL)
    changed = []
    for (cell, compared, both), is_picked in zip(found, picked, strict=True):
        said: Outcome = outcome(compared.interval, both) if is_picked else "tie"
        ask = measured_speed if cell.is_plain else measured_speedup
        sides = ask(before, cell), ask(after, cell)
        if sides[0] is not None and sides[1] is not None:
            changed.append(Change(cell, sides[0], sides[1], compared.interval, both, said))
    return changed


def _gains(results: Results, cell: Cell) -> dict[str, Floats]:
    """By case, of each repetition: plain decoding's tokens per second, or the speed-up in its block."""
    cases = shared_rates(results, cell, cell.plain).items()
    return {case: (1.0 if cell.is_plain else plain) / ours for case, (plain, ours) in cases}


def differences(before: Results, after: Results) -> list[str]:
    """What else is not the same in two runs, one line each: machine, build, models, plan, what ran."""
    after = _called_alike(before, after)
    lines = [
        f"{what}, {key}: {_short(first.get(key))} / {_short(second.get(key))}"
        for what, first, second in (
            ("machine", before.head.machine, after.head.machine),
            ("plan", before.head.plan, after.head.plan),
        )
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    ]
    prints = [
        {row.model: row.fingerprint for row in results.models if row.beside is None}
        for results in (before, after)
    ]
    for name in sorted(prints[0].keys() & prints[1].keys()):
        if prints[0][name] != prints[1][name]:
            lines.append(f"model {name}: another file ({prints[0][name]} / {prints[1][name]})")
    lines += _other_prompts(before, after)
    for only, there, gone in (("first", before, after), ("second", after, before)):
        cells = [cell for cell in there.runs_by_cell if cell not in gone.runs_by_cell]
        names = [" × ".join(filter(None, (c.target, c.draft, _setting(c), c.workload))) for c in cells]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"only in the {only}: {', '.join(names[:3])}{more}")
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
    first, second = ([row for row in results.models if row.role == "target"] for results in (before, after))
    known = {(r.fingerprint, r.backend): r.model for r in first if r.backend and r.model not in after.targets}
    files = {row.model: (row.fingerprint, row.backend) for row in second if row.model not in before.targets}
    names = {name: known[file] for name, file in files.items() if file in known}
    kinds = [field.name for field in fields(after) if field.name != "head"] if names else []
    renamed: dict[str, Any] = {kind: tuple(_called(r, names) for r in getattr(after, kind)) for kind in kinds}
    return replace(after, **renamed)


def _called(row: Any, names: Mapping[str, str]) -> Any:
    """A row with the targets in it renamed."""
    places = ["target", "beside", "reference", *(["model"] if getattr(row, "role", "") == "target" else [])]
    found = {place: name for place in places if (name := names.get(getattr(row, place, None) or ""))}
    return row.model_copy(update=found) if found else row


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


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _setting(cell: Cell) -> str:
    return cell.contestant or cell.setting


def _table(found: Sequence[Change]) -> Table:
    """Which draft another engine has is not known."""
    table = Table("target", "draft", "setting", "workload", "figure", box=None, pad_edge=False)
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    for change in found:
        cell, ratio = change.cell, change.ratio
        draft = NOTHING if cell.contestant else cell.draft or "none"
        low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
        table.add_row(
            *(Text(printable(name)) for name in (cell.target, draft, _setting(cell), cell.workload or "all")),
            change.figure,
            f"{change.before.value:.2f}",
            f"{change.after.value:.2f}",
            f"{100 * (ratio.value - 1):+.1f} % ({low:+.1f} to {high:+.1f})",
        )
    return table
