"""The time that a sweep took, against that of running every combination for real."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from outrider.core.errors import SettingError
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary.predictions import prediction_error
from outrider.lab.settings import Setting


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Seconds of model time that the sweep's rows account for, and what everything would have taken.

    Loading models, measuring cost curves and replaying leave no seconds in the rows: they are in neither.
    Incomplete blocks are not in it.
    """

    recording_s: float
    """the targets' own answers, plainly decoded"""
    scoring_s: float
    """drafts over recorded answers"""
    running_s: float
    """finalists, controls, plain decoding and other engines"""
    everything_s: float | None
    """every combination of the grid for real, as often as plain decoding ran: predicted seconds scaled by
    what was measured over what was predicted, prompts included. None where nothing was replayed"""
    combinations: int
    """that many: settings of a target, a draft (or none) and a workload, plain decoding included"""
    ran: int
    """and so many of them ran"""

    @property
    def took_s(self) -> float:
        """Recording, scoring and running together."""
        return self.recording_s + self.scoring_s + self.running_s

    @property
    def took_ratio(self) -> float | None:
        """The share of everything's time that the sweep took."""
        return self.took_s / self.everything_s if self.everything_s else None


_Place = tuple[str | None, str | None]
"""A target and a workload, None for any"""


def time_saved(results: Results) -> TimeAccount:
    """What the sweep took against running every combination. A setting without a draft model is one
    combination, however many drafts it was replayed beside."""
    combinations = _combinations(results)
    scale, prompts, repeats = _scales(results), _prompt_seconds(results), _repetitions(results)
    everything = 0.0
    for cell, case_seconds in combinations.items():
        place = (cell.target, cell.workload or "")
        factor = scale.get(place, scale.get((cell.target, None), scale[None, None]))
        once_s = sum(s * factor + prompts.get((*place, case), 0.0) for case, s in case_seconds.items())
        everything += once_s * repeats.get(place, repeats[None, None])
    ours = {cell for cell in results.runs_by_cell if cell.contestant is None}
    return TimeAccount(
        recording_s=sum(row.prefill_s + row.decode_s for row in results.answers),
        scoring_s=sum(row.seconds for row in results.offers),
        running_s=sum(row.prefill_s + row.decode_s for row in results.runs),
        everything_s=everything or None,
        combinations=len(combinations),
        ran=sum(cell in ours or cell._replace(draft=None) in ours for cell in combinations),
    )


def _combinations(results: Results) -> dict[Cell, Mapping[str, float]]:
    """Cells of the grid, each once, with the predicted seconds of each case: plain decoding and lookups have
    no draft model."""
    found: dict[Cell, Mapping[str, float]] = {}
    for cell, row in results.prediction_by_cell.items():
        found.setdefault(cell.plain, {case.case: case.plain_s for case in row.cases})
        alone = cell if _uses_model(cell.setting) else cell._replace(draft=None)
        if alone not in found or cell == alone:
            found[alone] = {case.case: case.seconds for case in row.cases}
    return found


def _uses_model(name: str) -> bool:
    try:
        return Setting.of(name).uses_model
    except SettingError:  # a name of a later version
        return True


def _scales(results: Results) -> dict[_Place, float]:
    """Measured over predicted seconds: by target and workload, by target, over all; 1 where nothing ran."""
    ratios: dict[_Place, list[float]] = defaultdict(list)
    for point in prediction_error(results).points:
        target = point.cell.target
        for place in ((target, point.cell.workload), (target, None), (None, None)):
            ratios[place].append(point.predicted_tokens_per_s / point.measured_tokens_per_s)
    return {(None, None): 1.0} | {place: median(found) for place, found in ratios.items()}


def _prompt_seconds(results: Results) -> dict[tuple[str, str, str], float]:
    """Reading of each case's prompt: the mean over our requests, of which the first in a block reads it for
    all; or what it took when the answer was recorded."""
    ran: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in results.runs:
        if row.contestant is None:
            ran[row.target, row.workload, row.case].append(row.prefill_s)
    recorded = {(row.target, row.workload, row.case): row.prefill_s for row in results.answers}
    return recorded | {case: fmean(seconds) for case, seconds in ran.items()}


def _repetitions(results: Results) -> dict[_Place, int]:
    """Complete blocks by target and workload; where there is none as many as elsewhere, or as planned."""
    counted = Counter[_Place]((row.target, row.workload) for row in results.blocks)
    planned = int(results.head.plan.get("repetitions_least", 1))
    return {(None, None): round(median(counted.values())) if counted else planned, **counted}
