"""The time that a sweep took, against that of running every combination for real."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from outrider.bench.results import Cell, Results
from outrider.bench.summary.predictions import prediction_error
from outrider.core.errors import SettingError
from outrider.lab.rows import PredictionRow
from outrider.lab.settings import PLAIN, Setting


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


def time_saved(results: Results) -> TimeAccount:
    """What the sweep took against running every combination. A setting without a draft model is one
    combination, however many drafts it was replayed beside."""
    combinations = _combinations(results)
    scale = _scales(results)
    prompts = _prompt_seconds(results)
    repeats = _repetitions(results)
    everything = 0.0
    for cell in combinations:
        case_seconds = _seconds(results, cell)
        factor = scale.get((cell.target, cell.workload), scale.get((cell.target, None), scale[None, None]))
        once_s = sum(
            seconds * factor + prompts.get((cell.target, cell.workload, case), 0.0)
            for case, seconds in case_seconds.items()
        )
        everything += once_s * repeats.get((cell.target, cell.workload), repeats[None, None])
    ours = {cell for cell in results.runs_by_cell if cell.contestant is None}
    return TimeAccount(
        recording_s=sum(row.prefill_s + row.decode_s for row in results.answers),
        scoring_s=sum(row.seconds for row in results.offers),
        running_s=sum(row.prefill_s + row.decode_s for row in results.runs),
        everything_s=everything or None,
        combinations=len(combinations),
        ran=sum(cell in ours or _without_draft(cell) in ours for cell in combinations),
    )


def _without_draft(cell: Cell) -> Cell:
    return cell._replace(draft=None)


def _combinations(results: Results) -> list[Cell]:
    """Cells of the grid, each once: plain decoding and lookups have no draft model."""
    found: dict[Cell, None] = {}
    for cell in results.prediction_by_cell:
        found[cell.plain] = None
        found[cell if _uses_model(cell.setting) else _without_draft(cell)] = None
    return list(found)


def _uses_model(name: str) -> bool:
    try:
        return Setting.of(name).uses_model
    except SettingError:  # a name of a later version: its draft is believed
        return True


def _seconds(results: Results, cell: Cell) -> Mapping[str, float]:
    """Predicted decoding of each case."""
    if (row := _prediction(results, cell)) is not None:
        return {case.case: case.seconds for case in row.cases}
    beside = next(r for r in results.predictions if (r.target, r.workload) == (cell.target, cell.workload))
    return {case.case: case.plain_s for case in beside.cases}  # plain decoding without a row of its own


def _prediction(results: Results, cell: Cell) -> PredictionRow | None:
    exact = results.prediction_by_cell.get(cell)
    if exact is not None or cell.setting == PLAIN.name:
        return exact
    drafts = [results.prediction_by_cell.get(cell._replace(draft=draft)) for draft in results.drafts]
    return next((row for row in drafts if row is not None), None)


def _scales(results: Results) -> dict[tuple[str | None, str | None], float]:
    """Measured over predicted seconds: by target and workload, by target, over all; 1 where nothing ran."""
    ratios: dict[tuple[str | None, str | None], list[float]] = {}
    for point in prediction_error(results).points:
        ratio = point.predicted_tokens_per_s / point.measured_tokens_per_s
        for key in ((point.cell.target, point.cell.workload), (point.cell.target, None), (None, None)):
            ratios.setdefault(key, []).append(ratio)
    return {(None, None): 1.0} | {key: median(found) for key, found in ratios.items()}


def _prompt_seconds(results: Results) -> dict[tuple[str | None, str | None, str], float]:
    """Reading of each case's prompt: the mean over our requests, of which the first in a block reads it for
    all; or what it took when the answer was recorded."""
    found: dict[tuple[str | None, str | None, str], float] = {
        (row.target, row.workload, row.case): row.prefill_s for row in results.answers
    }
    ran: dict[tuple[str | None, str | None, str], list[float]] = defaultdict(list)
    for row in results.runs:
        if row.contestant is None:
            ran[row.target, row.workload, row.case].append(row.prefill_s)
    return found | {case: fmean(seconds) for case, seconds in ran.items()}


def _repetitions(results: Results) -> dict[tuple[str | None, str | None], int]:
    """Complete blocks by target and workload; where there is none as many as elsewhere, or as planned."""
    counted: Counter[tuple[str | None, str | None]] = Counter()
    counted.update((row.target, row.workload) for row in results.blocks)
    planned = results.head.plan.get("repetitions_least", 1)
    usual = round(median(counted.values())) if counted else int(planned)
    return {(None, None): usual, **counted}
