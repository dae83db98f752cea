"""The chart that a report begins with: of each target the speed-up of every pairing, a bar for each, with its
interval. Its rows are those of a table, so that it is read, and heard, without the bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core import numbers
from outrider.lab.bench.report.view import Best, View, draft_name, workload_name


@dataclass(frozen=True, slots=True)
class Bar:
    """A pairing at its best setting under a workload. Places on the axis are parts of its length, in
    percent."""

    best: Best
    value: float
    low: float
    high: float
    one: float
    """where plain decoding is"""

    @property
    def cells(self) -> dict[str, str]:
        """What stands beside it, by column."""
        best = self.best
        return {
            "draft": draft_name(best.draft),
            "workload": workload_name(best.workload),
            "speed-up": numbers.speedup(best.speedup),
            "95 % interval": numbers.bounds(best.speedup),
            "verdict": best.said,
            "setting": best.setting or numbers.NOTHING,
            "plain tokens/s": numbers.rate(best.plain),
        }

    @property
    def kind(self) -> str:
        """How it is drawn."""
        return (self.best.outcome or "unknown") if self.best.is_measured else "predicted"


def bars(view: View, target: str) -> Sequence[Bar]:
    """Of all workloads together first, then of each."""
    cells = [view.best(target, draft, w) for w in view.pooled_first for draft in view.columns_of(target)]
    ends = [cell.speedup.high if cell.speedup.high < _MOST * cell.speedup.value else cell.speedup.value
            for cell in cells if cell.speedup]  # fmt: skip
    longest = max([1.25, *ends])
    return [_bar(cell, longest) for cell in cells]


_MOST = 2.0
"""times its value: an interval that reaches farther is cut off, or it would make all bars short"""


def _bar(cell: Best, longest: float) -> Bar:
    def place(value: float) -> float:
        return round(100 * min(value / longest, 1.0), 1)

    if cell.speedup is None:
        return Bar(cell, 0.0, 0.0, 0.0, place(1.0))
    return Bar(cell, place(cell.speedup.value), place(cell.speedup.low), place(cell.speedup.high), place(1.0))
