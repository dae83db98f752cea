"""How fast, and how much faster than plain decoding: measured, with intervals, against the noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from outrider.bench.results import Cell, Results
from outrider.bench.summary.prediction import predicted_speedup
from outrider.bench.summary.rates import paired, plain_cell, rates, workloads_of
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import Interval, estimate, self_ratio

__all__ = [
    "Outcome",
    "best_setting",
    "contestants",
    "measured_settings",
    "measured_speed",
    "measured_speedup",
    "noise",
    "outcome",
    "plain_speed",
    "predicted_settings",
]

Outcome = Literal["faster", "slower", "tie"]


def measured_speedup(
    results: Results,
    target: str,
    draft: str | None,
    setting: str,
    workload: str | None,
    *,
    contestant: str | None = None,
    draw_cases: bool = True,
) -> Interval | None:
    """Plain decoding's time over the setting's, in the same blocks: of each case the ratio of medians over
    repetitions, over cases (and then workloads) the geometric mean. None: not run, or not in every workload.

    `draw_cases` False: the interval of these prompts alone, which narrows with every repetition.
    """
    cell = Cell(target, draft, setting, workload, contestant)
    strata = paired(results, cell, plain_cell(target, workload))
    return estimate(strata, draw_cases=draw_cases).interval if strata else None


def measured_speed(
    results: Results,
    target: str,
    draft: str | None,
    setting: str,
    workload: str | None,
    *,
    contestant: str | None = None,
) -> Interval | None:
    """Tokens per second while decoding: the geometric mean over cases of their medians."""
    cell = Cell(target, draft, setting, workload, contestant)
    strata = paired(results, cell, cell)
    if not strata:
        return None
    return estimate([[(np.ones_like(rate), rate) for _, rate in cases] for cases in strata]).interval


def plain_speed(results: Results, target: str, workload: str | None) -> Interval | None:
    """Tokens per second of plain decoding."""
    return measured_speed(results, target, None, PLAIN.name, workload)


def noise(results: Results, target: str, workload: str | None) -> Interval | None:
    """Plain decoding against itself, between disjoint halves of its repetitions: what lies inside is no
    result. None where nothing was repeated."""
    cell = plain_cell(target, workload)
    strata = [
        [np.array(list(blocks.values())) for blocks in rates(results, cell._replace(workload=name)).values()]
        for name in workloads_of(results, cell) or []
    ]
    return self_ratio(strata) if all(strata) else None


def outcome(speedup: Interval, noise: Interval | None) -> Outcome:
    """A tie where the interval holds 1, or where the figure lies within the noise."""
    within = noise is not None and noise.low <= speedup.value <= noise.high
    if within or speedup.low <= 1 <= speedup.high:
        return "tie"
    return "faster" if speedup.value > 1 else "slower"


def measured_settings(results: Results, target: str, draft: str | None, workload: str | None) -> list[str]:
    """Our own settings that ran for real in this cell, plain decoding apart, in order."""
    cells = [cell for cell in results.runs_by_cell if cell.contestant is None]
    names = _settings(cells, target, draft, workload)
    cell = Cell(target, draft, "", workload)
    return [name for name in names if workloads_of(results, cell._replace(setting=name))]


def predicted_settings(results: Results, target: str, draft: str | None, workload: str | None) -> list[str]:
    """Settings that were replayed in this cell, plain decoding apart, in order."""
    names = _settings(results.prediction_by_cell, target, draft, workload)
    return [name for name in names if predicted_speedup(results, target, draft, name, workload)]


def contestants(results: Results, target: str, workload: str | None) -> list[Cell]:
    """Cells of other engines that ran."""
    cells = [cell for cell in results.runs_by_cell if cell.contestant is not None and cell.target == target]
    found = list(dict.fromkeys(cell._replace(workload=workload) for cell in cells))
    return [cell for cell in found if _ran(results, cell)]


def best_setting(results: Results, target: str, draft: str | None, workload: str | None) -> str:
    """The setting with the highest speed-up: of those that ran for real, or where none did of those replayed;
    "plain" where none is above 1."""
    settings = measured_settings(results, target, draft, workload)
    if settings:
        found = {name: measured_speedup(results, target, draft, name, workload) for name in settings}
    else:
        settings = predicted_settings(results, target, draft, workload)
        found = {name: predicted_speedup(results, target, draft, name, workload) for name in settings}
    values = {name: interval.value for name, interval in found.items() if interval is not None}
    best = max(values, key=values.__getitem__, default=PLAIN.name)
    return best if values.get(best, 1.0) > 1 else PLAIN.name


def _ran(results: Results, cell: Cell) -> bool:
    workloads = workloads_of(results, cell)
    return bool(workloads) and all(cell._replace(workload=w) in results.runs_by_cell for w in workloads or ())


def _settings(cells: Iterable[Cell], target: str, draft: str | None, workload: str | None) -> list[str]:
    names = [
        cell.setting
        for cell in cells
        if (cell.target, cell.draft) == (target, draft) and workload in (None, cell.workload)
    ]
    return [name for name in dict.fromkeys(names) if name != PLAIN.name]
