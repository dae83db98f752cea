"""What the recorded calls of answers say about costs: the engine's own times, and the stored curves.

A call that is measured by itself is not quite the one in a generation: there other memory was used in
between, the context is real, all rows of logits are read. So a target's curve is corrected by its answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from outrider.costs import CallCosts
from outrider.lab.rows import AnswerRow, CostsRow

_MIN_CALLS = 3
"""of a size that make its time known"""


def target_costs(measured: CallCosts, answers: Sequence[AnswerRow]) -> CallCosts:
    """The target's curve, corrected by all calls of its answers."""
    return measured.corrected(call[:3] for answer in answers for call in answer.calls)


def own_times(answers: Sequence[AnswerRow]) -> tuple[float, float]:
    """The engine's own seconds in a plain step, and how many more for each drafted token that was checked."""
    own: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        for num_tokens, _, _, seconds in answer.calls:
            own[num_tokens].append(seconds)
    plain_s = median(own[1]) if own[1] else 0.0
    rises = [
        (median(seconds) - plain_s) / (num_tokens - 1)
        for num_tokens, seconds in own.items()
        if num_tokens > 3 and len(seconds) >= _MIN_CALLS
    ]
    return plain_s, max(median(rises), 0.0) if rises else 0.0


def curve_of(row: CostsRow) -> CallCosts:
    """The curve that a row holds."""
    return CallCosts.from_json(row.curve, f"costs of {row.model}")
