"""A run's figures, each worked out from its rows once: speeds with intervals, what is best, verdicts.

A request's rate is seconds per token while decoding: the draft model's reading of the prompt counts, the
target's does not. docs/method.md says what each figure is over. None always means: not run, or not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Cell, Results
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import LEVEL, Floats, Strata, estimate, holm, self_ratio, t_tail

Outcome = Literal["faster", "slower", "tie", "unsettled"]
"""against plain decoding: the last where the figure is away from 1, and not for certain"""

_TIE_RATIO = 1.05
"""What is uncertain is a tie if it is nearer to 1, else unsettled."""
_MAX_DEGREES = 400
"""of freedom: beyond them nothing changes"""


# Speeds


@cache
def _rates(results: Results, cell: Cell) -> Mapping[str, Mapping[str, float]]:
    """Seconds per token by case and block, of a cell with one workload."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in results.runs_by_cell.get(cell, ()):
        if row.tokens > 0 and row.decode_s > 0:
            found[row.case][row.block] = row.decode_s / row.tokens
    return found


@cache
def measured_speedup(results: Results, cell: Cell) -> Interval | None:
    """Plain decoding's time over the cell's, in the same blocks: of each case the ratio of medians over
    repetitions, over cases (and then workloads) the geometric mean. None: not run, or not in every
    workload."""
    strata = paired(results, cell, cell.plain)
    return estimate(strata) if strata else None


@cache
def measured_speed(results: Results, cell: Cell) -> Interval | None:
    """Tokens per second while decoding: the geometric mean over cases of their medians."""
    strata = paired(results, cell, cell)
    if not strata:
        return None
    return estimate([[(np.ones_like(rate), rate) for _, rate in cases] for cases in strata])


@cache
def predicted_speedup(results: Results, cell: Cell) -> Interval | None:
    """Replayed plain decoding's time over the setting's; over cases (and then workloads) the geometric mean.
    The interval is over cases; that costs were measured with an error is not in it."""
    replayed = {row.workload for row in results.predictions if row.target == cell.target}
    names = (
        [name for name in results.workloads if name in replayed] if cell.workload is None else [cell.workload]
    )
    found = [results.prediction_by_cell.get(cell._replace(workload=name)) for name in names]
    strata = [
        [(np.array([case.plain_s]), np.array([case.seconds])) for case in row.cases if case.seconds > 0]
        for row in found
        if row is not None
    ]
    return estimate(strata) if strata and all(found) and all(strata) else None


@cache
def noise(results: Results, target: str, workload: str | None) -> Interval | None:
    """Plain decoding against itself, between disjoint halves of its repetitions: what lies inside is no
    result. None where nothing was repeated."""
    cell = Cell(target, None, PLAIN.name, workload)
    strata = [
        [np.array(list(blocks.values())) for blocks in _rates(results, cell._replace(workload=name)).values()]
        for name in _workloads_of(results, cell)
    ]
    return self_ratio(strata) if all(strata) else None


def paired(results: Results, cell: Cell, reference: Cell) -> Strata | None:
    """By workload and case the rates of reference and cell in the blocks that have both, as `estimate` takes
    them. None where they share none in one of the workloads."""
    strata: list[list[tuple[Floats, Floats]]] = []
    for workload in _workloads_of(results, cell):
        ours, theirs = (_rates(results, c._replace(workload=workload)) for c in (cell, reference))
        strata.append([])
        for case in ours:
            if blocks := [block for block in theirs.get(case, ()) if block in ours[case]]:
                first = np.array([theirs[case][block] for block in blocks])
                strata[-1].append((first, np.array([ours[case][block] for block in blocks])))
    return strata if strata and all(strata) else None


def _workloads_of(results: Results, cell: Cell) -> list[str]:
    """The workloads that a cell is over. A figure over all of them is over all that the target decoded
    plainly: none where the cell did not run in each, for a mean over others would not compare with it."""
    if cell.workload is not None:
        return [cell.workload]
    ran = [name for name in results.workloads if cell.plain._replace(workload=name) in results.runs_by_cell]
    return ran if all(cell._replace(workload=name) in results.runs_by_cell for name in ran) else []


# What is best, and whether that means anything


def outcome(speedup: Interval, noise: Interval | None, *, is_certain: bool = True) -> Outcome:
    """What a figure amounts to; `is_certain` False: it could be chance, whatever its interval."""
    if noise is not None and noise.low <= speedup.value <= noise.high:
        return "tie"
    if is_certain and not speedup.low <= 1 <= speedup.high:
        return "faster" if speedup.value > 1 else "slower"
    return "tie" if 1 / _TIE_RATIO <= speedup.value <= _TIE_RATIO else "unsettled"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a way to speculate comes to, be it slower than plain decoding. Where nothing is known of a target
    and a draft under a workload, `speedup` is None and the cell's setting empty."""

    cell: Cell
    speedup: Interval | None = None
    outcome: Outcome | None = None
    is_measured: bool = False
    """else predicted"""

    @property
    def is_faster(self) -> bool:
        """Whether it is faster than plain decoding, or most likely so."""
        is_above = self.speedup is not None and self.speedup.value > 1
        return self.outcome == "faster" or (self.outcome == "unsettled" and is_above)


@cache
def bests(results: Results) -> Mapping[tuple[str, str | None, str | None], Finding]:
    """The fastest setting of every target with every draft under every workload, by these three. Verdicts of
    what was measured are given for all of them together, so that none is a lucky one of many."""
    keys = [(t, d, w) for w in results.pooled_first for t in results.targets for d in results.columns]
    found = {key: _fastest(results, *key) for key in keys}
    measured = {one.cell: one for one in verdicts(results, [f.cell for f in found.values() if f.is_measured])}
    return {key: measured.get(one.cell, one) for key, one in found.items()}


def best(results: Results, target: str, draft: str | None, workload: str | None) -> Finding:
    """The fastest setting of a target with a draft under a workload."""
    return bests(results)[target, draft, workload]


def bests_of(results: Results, target: str) -> list[Finding]:
    """With every draft that lines up with the target, over all workloads together and then under each."""
    columns = results.columns_of(target)
    return [best(results, target, draft, w) for w in results.pooled_first for draft in columns]


def _fastest(results: Results, target: str, draft: str | None, workload: str | None) -> Finding:
    """Of the settings that ran for real, or where none did of those replayed."""
    kinds: tuple[tuple[Any, Iterable[Cell]], ...] = (
        (measured_speedup, results.runs_by_cell),
        (predicted_speedup, results.prediction_by_cell),
    )
    for ask, cells in kinds:
        mine = [cell for cell in cells if cell[:2] == (target, draft) and workload in (None, cell.workload)]
        wanted = dict.fromkeys(cell._replace(workload=workload) for cell in mine if not cell.is_plain)
        if found := {cell: interval for cell in wanted if (interval := ask(results, cell))}:
            cell = max(found, key=lambda cell: found[cell].value)
            said = outcome(found[cell], noise(results, target, workload))
            return Finding(cell, found[cell], said, ask is measured_speedup)
    return Finding(Cell(target, draft, "", workload))


def verdicts(results: Results, cells: Sequence[Cell] | None = None) -> list[Finding]:
    """What these cells, or all that were measured, came to; cells that did not run are left out. "faster" and
    "slower" are said only of cells that Holm's procedure picks from all of them together (the chance that
    noise made any of them is at most 5 %) and whose interval, that of other prompts, does not hold 1."""
    wanted = [cell for cell in (results.runs_by_cell if cells is None else cells) if not cell.is_plain]
    found = [(cell, strata) for cell in wanted if (strata := paired(results, cell, cell.plain))]
    speedups = [estimate(strata) for _, strata in found]
    p_values = [
        _p_value(results, cell.target, strata, speedup.value)
        for (cell, strata), speedup in zip(found, speedups, strict=True)
    ]
    judged = []
    for (cell, _), speedup, is_picked in zip(found, speedups, holm(p_values, 1 - LEVEL), strict=True):
        said = outcome(speedup, noise(results, cell.target, cell.workload), is_certain=is_picked)
        judged.append(Finding(cell, speedup, said, is_measured=True))
    return judged


def _p_value(results: Results, target: str, strata: Strata, speedup: float) -> float:
    """How often noise would move a figure over these requests so far from 1."""
    deviation, degrees = _repeatability(results, target)
    if degrees < 1 or deviation <= 0:
        return 1.0
    groups = [sum(1 / len(first) for first, _ in cases) / len(cases) ** 2 for cases in strata]
    error = deviation * math.sqrt(sum(groups)) / len(groups)
    return t_tail(abs(math.log(speedup)) / error, min(degrees, _MAX_DEGREES))


@cache
def _repeatability(results: Results, target: str) -> tuple[float, int]:
    """The standard deviation of a log speed-up from block to block, over everything of a target that ran more
    than once, and its degrees of freedom."""
    squares, degrees = 0.0, 0
    cells = [cell for cell in results.runs_by_cell if cell.target == target and not cell.is_plain]
    for cases in (cases for cell in cells for cases in paired(results, cell, cell.plain) or ()):
        for first, second in cases:
            logs = np.log(first / second)
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += len(logs) - 1
    return math.sqrt(squares / degrees) if degrees else 0.0, degrees


# How well predictions met what was measured


@cache
def prediction_error(results: Results) -> tuple[int, float] | None:
    """Of how many results that were both predicted and run, and the median of the relative errors of their
    predicted speed-ups; None where nothing was."""
    cells = [cell for cell in results.runs_by_cell if not cell.is_plain]
    pairs = [(predicted_speedup(results, cell), measured_speedup(results, cell)) for cell in cells]
    errors = [abs(predicted.value / ran.value - 1) for predicted, ran in pairs if predicted and ran]
    return (len(errors), float(np.median(errors))) if errors else None
