"""Which settings run for real: the best by prediction, the automatic choice, and some controls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.lab.rows import ChoiceRow, PredictionRow
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting

__all__ = ["choose", "predicted_ratio"]


def predicted_ratio(row: PredictionRow) -> float:
    """Geometric mean over the cases of plain decoding's seconds over this setting's."""
    logs = [math.log(case.plain_s / case.seconds) for case in row.cases if case.seconds > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def choose(rows: Sequence[PredictionRow], *, finalists: int, controls: Sequence[Setting]) -> ChoiceRow:
    """The settings of one cell that run for real; `rows` are its predictions, one a setting.

    The automatic choice always does. Of settings that would do exactly the same, the first stands for all.
    """
    cell = rows[0]
    ranked = sorted(rows, key=predicted_ratio, reverse=True)
    chosen: list[str] = []
    seen: list[object] = []
    for row in ranked:
        if row.setting == PLAIN.name or len(chosen) == finalists:
            continue
        does = [(case.target_calls, case.draft_calls, case.drafted, case.accepted) for case in row.cases]
        if does not in seen:
            seen.append(does)
            chosen.append(row.setting)
    automatic = (AUTO_LOOKUP if cell.draft is None else AUTO).name
    wanted = [setting.name for setting in controls if setting.uses_model == (cell.draft is not None)]
    others = dict.fromkeys([automatic, *wanted])
    known = {row.setting for row in rows}
    return ChoiceRow(
        target=cell.target,
        draft=cell.draft,
        workload=cell.workload,
        finalists=tuple(chosen),
        controls=tuple(name for name in others if name in known and name not in chosen),
    )
