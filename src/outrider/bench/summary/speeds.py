"""How fast, and how much faster than plain decoding: measured, with intervals, against the noise.

A request's rate is seconds per token while decoding: the draft model's reading of the prompt counts, the
target's does not. docs/method.md says what each figure is over. None always means: not run, or not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from outrider.bench.results import Cell, Results
from outrider.bench.summary.predictions import predicted_speedup
from outrider.lab.settings import PLAIN
from outrider.lab.statistics import Interval, Strata, estimate, self_ratio

Floats = npt.NDArray[np.float64]
Outcome = Literal["faster", "slower", "tie"]


def measured_speedup(results: Results, cell: Cell, *, draw_cases: bool = True) -> Interval | None:
    """Plain decoding's time over the cell's, in the same blocks: of each case the ratio of medians over
    repetitions, over cases (and then workloads) the geometric mean. None: not run, or not in every workload.

    `draw_cases` False: the interval of these prompts alone, which narrows with every repetition.
    """
    strata = paired(results, cell, cell.plain)
    return estimate(strata, draw_cases=draw_cases).interval if strata else None


def measured_speed(results: Results, cell: Cell) -> Interval | None:
    """Tokens per second while decoding: the geometric mean over cases of their medians."""
    strata = paired(results, cell, cell)
    if not strata:
        return None
    return estimate([[(np.ones_like(rate), rate) for _, rate in cases] for cases in strata]).interval


def plain_speed(results: Results, target: str, workload: str | None) -> Interval | None:
    """Tokens per second of plain decoding."""
    return measured_speed(results, Cell.plain_of(target, workload))


def faster_than(results: Results, ours: Cell, theirs: Cell) -> tuple[Interval, Outcome] | None:
    """The tokens per second of one cell over those of another, over the cases that both have, and whether
    that is beyond the noise of both. They need not have run in the same blocks: one file under several native
    libraries did not. None where they share no case."""
    strata = []
    for workload in workloads_of(results, ours) or ():
        mine, other = (results.rates(cell._replace(workload=workload)) for cell in (ours, theirs))
        shared = [case for case in mine if case in other]
        if not shared:
            return None
        strata.append([(np.array([*other[c].values()]), np.array([*mine[c].values()])) for c in shared])
    if not strata:
        return None
    found = estimate(strata, paired=False).interval
    known = [noise(results, cell.target, cell.workload) for cell in (ours, theirs)]
    return found, outcome(found, combined_noise(known))


def noise(results: Results, target: str, workload: str | None) -> Interval | None:
    """Plain decoding against itself, between disjoint halves of its repetitions: what lies inside is no
    result. None where nothing was repeated."""
    cell = Cell.plain_of(target, workload)
    strata = [
        [np.array(list(blocks.values())) for blocks in results.rates(cell._replace(workload=name)).values()]
        for name in workloads_of(results, cell) or []
    ]
    return self_ratio(strata) if all(strata) else None


def combined_noise(found: Iterable[Interval | None], ratio: float = 0.0) -> Interval | None:
    """Several noises together, and a relative error beside them; None where none is known."""
    sizes = [math.log(interval.high) for interval in found if interval is not None]
    sizes += [math.log(1 + ratio)] if ratio else []
    size = math.hypot(*sizes)
    return Interval(1.0, math.exp(-size), math.exp(size)) if sizes else None


def outcome(speedup: Interval, noise: Interval | None) -> Outcome:
    """A tie where the interval holds 1, or where the figure lies within the noise."""
    within = noise is not None and noise.low <= speedup.value <= noise.high
    if within or speedup.low <= 1 <= speedup.high:
        return "tie"
    return "faster" if speedup.value > 1 else "slower"


def paired(results: Results, cell: Cell, reference: Cell) -> Strata | None:
    """By workload and case the rates of reference and cell in the blocks that have both, as `estimate` takes
    them. None where they share none in one of the workloads."""
    strata = []
    for workload in workloads_of(results, cell) or ():
        ours = results.rates(cell._replace(workload=workload))
        theirs = results.rates(reference._replace(workload=workload))
        cases = [_shared(theirs[case], ours[case]) for case in ours if case in theirs]
        if not (cases := [case for case in cases if len(case[0])]):
            return None
        strata.append(cases)
    return strata or None


def _shared(first: Mapping[str, float], second: Mapping[str, float]) -> tuple[Floats, Floats]:
    blocks = [block for block in first if block in second]
    return np.array([first[block] for block in blocks]), np.array([second[block] for block in blocks])


def workloads_of(results: Results, cell: Cell) -> list[str] | None:
    """The workloads that a cell is over. A figure over all of them is over all that the target decoded
    plainly: None where the cell did not run in each, for a mean over others would not compare with it."""
    if cell.workload is not None:
        return [cell.workload]
    ran = [name for name in results.workloads if Cell.plain_of(cell.target, name) in results.runs_by_cell]
    has_all = all(cell._replace(workload=name) in results.runs_by_cell for name in ran)
    return ran if ran and has_all else None


def measured_settings(results: Results, target: str, draft: str | None, workload: str | None) -> list[str]:
    """Our own settings that ran for real in this cell, plain decoding apart, in order."""
    cells = [cell for cell in results.runs_by_cell if cell.contestant is None]
    names = _settings(cells, target, draft, workload)
    return [name for name in names if workloads_of(results, Cell(target, draft, name, workload))]


def predicted_settings(results: Results, target: str, draft: str | None, workload: str | None) -> list[str]:
    """Settings that were replayed in this cell, plain decoding apart, in order."""
    names = _settings(results.prediction_by_cell, target, draft, workload)
    return [name for name in names if predicted_speedup(results, Cell(target, draft, name, workload))]


def best_setting(results: Results, target: str, draft: str | None, workload: str | None) -> str:
    """The setting with the highest speed-up: of those that ran for real, or where none did of those replayed;
    "plain" where none is above 1."""
    ask: Callable[[Results, Cell], Interval | None] = measured_speedup
    if not (names := measured_settings(results, target, draft, workload)):
        ask, names = predicted_speedup, predicted_settings(results, target, draft, workload)
    found = {name: ask(results, Cell(target, draft, name, workload)) for name in names}
    values = {name: interval.value for name, interval in found.items() if interval is not None}
    best = max(values, key=values.__getitem__, default=PLAIN.name)
    return best if values.get(best, 1.0) > 1 else PLAIN.name


def _settings(cells: Iterable[Cell], target: str, draft: str | None, workload: str | None) -> list[str]:
    names = [
        cell.setting
        for cell in cells
        if (cell.target, cell.draft) == (target, draft) and workload in (None, cell.workload)
    ]
    return [name for name in dict.fromkeys(names) if name != PLAIN.name]
