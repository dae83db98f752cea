"""How fast, and how much faster than plain decoding: measured, with intervals, against the noise.

A request's rate is seconds per token while decoding: the draft model's reading of the prompt counts, the
target's does not. docs/method.md says what each figure is over. None always means: not run, or not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Cell, Results, once, rates
from outrider.lab.bench.summary.predictions import predicted_speedup
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import LEVEL, Floats, Strata, estimate, holm, self_ratio, t_tail

Outcome = Literal["faster", "slower", "tie", "unsettled"]
"""against plain decoding: the last where the figure is away from 1, and not for certain"""

_TIE_RATIO = 1.05
"""What is uncertain is a tie if it is nearer to 1, else unsettled."""


@once
def measured_speedup(results: Results, cell: Cell) -> Interval | None:
    """Plain decoding's time over the cell's, in the same blocks: of each case the ratio of medians over
    repetitions, over cases (and then workloads) the geometric mean. None: not run, or not in every
    workload."""
    strata = paired(results, cell, cell.plain)
    return estimate(strata).interval if strata else None


@once
def measured_speed(results: Results, cell: Cell) -> Interval | None:
    """Tokens per second while decoding: the geometric mean over cases of their medians."""
    strata = paired(results, cell, cell)
    if not strata:
        return None
    return estimate([[(np.ones_like(rate), rate) for _, rate in cases] for cases in strata]).interval


def plain_speed(results: Results, target: str, workload: str | None) -> Interval | None:
    """Tokens per second of plain decoding."""
    return measured_speed(results, Cell(target, None, PLAIN.name, workload))


def faster_than(results: Results, ours: Cell, theirs: Cell) -> tuple[Interval, Outcome] | None:
    """The tokens per second of one cell over those of another, over the cases that both have, and whether
    that is beyond the noise of both. They need not have run in the same blocks: one file under several native
    libraries did not. None where they share no case."""
    strata = []
    for workload in workloads_of(results, ours) or ():
        mine, other = (rates(results, cell._replace(workload=workload)) for cell in (ours, theirs))
        shared = [case for case in mine if case in other]
        if not shared:
            return None
        strata.append([(np.array([*other[c].values()]), np.array([*mine[c].values()])) for c in shared])
    if not strata:
        return None
    found = estimate(strata, paired=False).interval
    known = [noise(results, cell.target, cell.workload) for cell in (ours, theirs)]
    size = math.hypot(*(math.log(interval.high) for interval in known if interval))
    return found, outcome(found, Interval(1.0, math.exp(-size), math.exp(size)))


@once
def noise(results: Results, target: str, workload: str | None) -> Interval | None:
    """Plain decoding against itself, between disjoint halves of its repetitions: what lies inside is no
    result. None where nothing was repeated."""
    cell = Cell(target, None, PLAIN.name, workload)
    strata = [
        [np.array(list(blocks.values())) for blocks in rates(results, cell._replace(workload=name)).values()]
        for name in workloads_of(results, cell) or []
    ]
    return self_ratio(strata) if all(strata) else None


def outcome(speedup: Interval, noise: Interval | None, *, is_certain: bool = True) -> Outcome:
    """What a figure amounts to; `is_certain` False: it could be chance, whatever its interval."""
    if noise is not None and noise.low <= speedup.value <= noise.high:
        return "tie"
    if is_certain and not speedup.low <= 1 <= speedup.high:
        return "faster" if speedup.value > 1 else "slower"
    return "tie" if 1 / _TIE_RATIO <= speedup.value <= _TIE_RATIO else "unsettled"


def paired(results: Results, cell: Cell, reference: Cell) -> Strata | None:
    """By workload and case the rates of reference and cell in the blocks that have both, as `estimate` takes
    them. None where they share none in one of the workloads."""
    strata: list[list[tuple[Floats, Floats]]] = []
    for workload in workloads_of(results, cell) or ():
        ours, theirs = (rates(results, c._replace(workload=workload)) for c in (cell, reference))
        strata.append([])
        for case in ours:
            if blocks := [block for block in theirs.get(case, ()) if block in ours[case]]:
                first = np.array([theirs[case][block] for block in blocks])
                strata[-1].append((first, np.array([ours[case][block] for block in blocks])))
    return strata if strata and all(strata) else None


def workloads_of(results: Results, cell: Cell) -> list[str] | None:
    """The workloads that a cell is over. A figure over all of them is over all that the target decoded
    plainly: None where the cell did not run in each, for a mean over others would not compare with it."""
    if cell.workload is not None:
        return [cell.workload]
    plain = Cell(cell.target, None, PLAIN.name, None)
    ran = [name for name in results.workloads if plain._replace(workload=name) in results.runs_by_cell]
    has_all = all(cell._replace(workload=name) in results.runs_by_cell for name in ran)
    return ran if ran and has_all else None


def _settings(cells: Iterable[Cell], target: str, draft: str | None, workload: str | None) -> list[str]:
    mine = [cell for cell in cells if (cell.target, cell.draft) == (target, draft)]
    names = dict.fromkeys(cell.setting for cell in mine if workload in (None, cell.workload))
    return [name for name in names if name != PLAIN.name]


def fastest(
    results: Results, target: str, draft: str | None, workload: str | None
) -> tuple[str, Interval | None, bool]:
    """The setting with the highest speed-up, be it below 1, this speed-up, and whether it is measured: of
    those that ran for real, or where none did of those replayed. An empty name and None where there are none.
    """
    kinds: tuple[tuple[Any, Iterable[Cell]], ...] = (
        (measured_speedup, results.runs_by_cell),
        (predicted_speedup, results.prediction_by_cell),
    )
    for ask, cells in kinds:
        names = _settings(cells, target, draft, workload)
        asked = {name: ask(results, Cell(target, draft, name, workload)) for name in names}
        if found := {name: interval for name, interval in asked.items() if interval}:
            best = max(found, key=lambda name: found[name].value)
            return best, found[best], ask is measured_speedup
    return "", None, False


def best_setting(results: Results, target: str, draft: str | None, workload: str | None) -> str:
    """The `fastest` setting; "plain" where it is not above 1."""
    best, speedup, _ = fastest(results, target, draft, workload)
    return best if speedup is not None and speedup.value > 1 else PLAIN.name


# Faster, slower or a tie, for many cells at once: the more are looked at, the more each has to show.


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """A measured speed-up, and what it amounts to among all the cells that were looked at with it.

    `speedup`'s interval is about other prompts of this kind, `p_value` about these: how often noise alone
    would show as much.
    """

    cell: Cell
    speedup: Interval
    p_value: float
    outcome: Outcome


MAX_DEGREES = 400
"""of freedom: beyond them nothing changes"""


def measured_cells(results: Results) -> list[Cell]:
    """Everything that ran for real, plain decoding apart, by workload."""
    return [cell for cell in results.runs_by_cell if not cell.is_plain]


def verdicts(results: Results, cells: Sequence[Cell] | None = None) -> list[CellVerdict]:
    """The verdicts of these cells, or of all that were measured; cells that did not run are left out.

    "faster" and "slower" are said only of cells that Holm's procedure picks from all of them together (the
    chance that noise made any of them is at most 5 %) and whose interval does not hold 1.
    """
    wanted = measured_cells(results) if cells is None else [cell for cell in cells if not cell.is_plain]
    found = []
    for cell in wanted:
        if strata := paired(results, cell, cell.plain):
            speedup = estimate(strata).interval
            found.append((cell, speedup, _p_value(results, cell.target, strata, speedup.value)))
    picked = holm([p_value for _, _, p_value in found], 1 - LEVEL)
    judged = []
    for (cell, speedup, p_value), is_picked in zip(found, picked, strict=True):
        said = outcome(speedup, noise(results, cell.target, cell.workload), is_certain=is_picked)
        judged.append(CellVerdict(cell, speedup, p_value, said))
    return judged


def _p_value(results: Results, target: str, strata: Strata, speedup: float) -> float:
    """How often noise would move a figure over these requests so far from 1."""
    deviation, degrees = _repeatability(results, target)
    if degrees < 1 or deviation <= 0:
        return 1.0
    groups = [sum(1 / len(first) for first, _ in cases) / len(cases) ** 2 for cases in strata]
    error = deviation * math.sqrt(sum(groups)) / len(groups)
    return t_tail(abs(math.log(speedup)) / error, min(degrees, MAX_DEGREES))


@once
def _repeatability(results: Results, target: str) -> tuple[float, int]:
    """The standard deviation of a log speed-up from block to block, over everything of a target that ran more
    than once, and its degrees of freedom."""
    squares, degrees = 0.0, 0
    cells = [cell for cell in measured_cells(results) if cell.target == target]
    for cases in (cases for cell in cells for cases in paired(results, cell, cell.plain) or ()):
        for first, second in cases:
            logs = np.log(first / second)
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(logs) - 1
    return math.sqrt(squares / degrees) if degrees else 0.0, degrees


# How well predictions met what was measured.


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Relative errors of the predicted speed-ups of `settings` results: the median of their sizes, and shares
    that are small."""

    settings: int
    median_error: float
    within_5_ratio: float
    within_10_ratio: float


@once
def prediction_error(results: Results) -> ErrorFigures | None:
    """Over everything that was both predicted and run; None where nothing was."""
    pairs = [(predicted_speedup(results, c), measured_speedup(results, c)) for c in measured_cells(results)]
    errors = [abs(predicted.value / ran.value - 1) for predicted, ran in pairs if predicted and ran]
    if not errors:
        return None
    within_5, within_10 = (sum(error <= most for error in errors) / len(errors) for most in (0.05, 0.1))
    return ErrorFigures(len(errors), float(np.median(errors)), within_5, within_10)
