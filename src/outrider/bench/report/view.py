"""What the views ask of a run's figures, each thing worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outrider.bench.results import Cell, Results
from outrider.bench.summary import predictions, speeds
from outrider.bench.summary.speeds import CellVerdict, verdicts
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.statistics import Interval, estimate


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest way to speculate with a target and a draft, or none, under a workload (None: all).

    `speedup` is measured or predicted; None where nothing is known, `setting` is then empty.
    """

    target: str
    draft: str | None
    workload: str | None
    setting: str
    speedup: Interval | None
    is_measured: bool
    outcome: str | None
    plain: Interval | None

    @property
    def cell(self) -> Cell:
        """What it is the figure of."""
        return Cell(self.target, self.draft, self.setting, self.workload)

    @property
    def said(self) -> str:
        """The verdict in a word or two."""
        if self.speedup is None:
            return "not known"
        return f"{self.outcome}" if self.is_measured else f"≈ predicted: {self.outcome}"


def draft_name(draft: str | None) -> str:
    """A draft as a column's head."""
    return "no draft model" if draft is None else draft


def automatic(draft: str | None) -> str:
    """The name of the automatic choice among all that there is."""
    return AUTO_LOOKUP.name if draft is None else AUTO.name


def workload_name(workload: str | None) -> str:
    """A workload as people read it."""
    return "all workloads" if workload is None else workload


_Ask = Callable[[Results, Cell], Interval | None]
"""A figure of a cell."""


class View:
    """A run's results with the figures that the report shows more than once."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._known: dict[tuple[_Ask, Cell], Interval | None] = {}

    @cached_property
    def columns(self) -> list[str | None]:
        """None for the target without a draft model, unless the plan left that out; then the drafts."""
        alone = self.results.head.plan.get("lookup_only", True) or not self.results.drafts
        return [None, *self.results.drafts] if alone else [*self.results.drafts]

    def columns_of(self, target: str) -> list[str | None]:
        """The columns of one target, without drafts that do not line up with it."""
        unusable = {pair.draft for pair in self.results.pairs if pair.target == target and not pair.usable}
        return [draft for draft in self.columns if draft not in unusable]

    @cached_property
    def pooled_first(self) -> list[str | None]:
        """All workloads pooled (None) and then each; just the one where there are no others."""
        workloads: list[str | None] = [*self.results.workloads]
        return workloads if len(workloads) == 1 else [None, *workloads]

    @property
    def pooled(self) -> str | None:
        """What figures over everything are over: the first of `pooled_first`."""
        return next(iter(self.pooled_first), None)

    @cached_property
    def bests(self) -> Mapping[tuple[str, str | None, str | None], Best]:
        """Every target with every draft under every workload, by these three. Verdicts of what was measured
        are given for all of them together, so that none is a lucky one of many."""
        keys = [(t, d, w) for w in self.pooled_first for t in self.results.targets for d in self.columns]
        found = {key: self._best(*key) for key in keys}
        measured = [best.cell for best in found.values() if best.is_measured]
        outcomes = {row.cell: row.outcome for row in verdicts(self.results, measured)}
        for key, best in found.items():
            if best.is_measured and best.cell in outcomes:
                found[key] = replace(best, outcome=outcomes[best.cell])
        return found

    @cached_property
    def verdicts(self) -> list[CellVerdict]:
        """Of everything that ran for real, judged together."""
        return verdicts(self.results)

    def best(self, target: str, draft: str | None, workload: str | None) -> Best:
        """A target with a draft under a workload."""
        return self.bests[target, draft, workload]

    def gain(self, one: Best, other: Best) -> Interval | None:
        """How much faster one is than the other, in the same blocks; None where they share none."""
        strata = speeds.paired(self.results, one.cell, other.cell)
        return estimate(strata).interval if strata else None

    def place(self, workload: str | None) -> int:
        """The workload's place among all: a name of it that suits any use."""
        return self.pooled_first.index(workload)

    def settings(self, target: str, draft: str | None) -> list[str]:
        """What was replayed or ran for a pair, plain decoding apart, and what needs no draft model."""
        cells = [*self.results.prediction_by_cell, *self.results.runs_by_cell]
        mine = [cell for cell in cells if cell.target == target and not cell.contestant]
        names = [cell.setting for wanted in (draft, None) for cell in mine if cell.draft == wanted]
        return [name for name in dict.fromkeys(names) if name != PLAIN.name]

    def plain(self, target: str, workload: str | None) -> Interval | None:
        """Tokens per second of plain decoding."""
        return self._once(speeds.measured_speed, Cell.plain_of(target, workload))

    def noise(self, target: str, workload: str | None) -> Interval | None:
        """Plain decoding against itself."""
        return self._once(_noise, Cell.plain_of(target, workload))

    def measured(self, cell: Cell) -> Interval | None:
        """The speed-up of a setting that ran. What needs no draft model may have run without one only."""
        return self._with_or_without(speeds.measured_speedup, cell)

    def predicted(self, cell: Cell) -> Interval | None:
        """The speed-up of a setting by replay."""
        return self._with_or_without(predictions.predicted_speedup, cell)

    def bound(self, target: str, draft: str | None, workload: str | None) -> float | None:
        """The speed-up that the best choice at every step would have given, known in hindsight."""
        found = self._once(predictions.bound_speedup, Cell(target, draft, automatic(draft), workload))
        return found.value if found else None

    def _best(self, target: str, draft: str | None, workload: str | None) -> Best:
        """The fastest setting that ran in this cell; where none did, of those replayed."""
        plain, noise = self.plain(target, workload), self.noise(target, workload)
        names = [s for s in self.settings(target, draft) if draft is None or Setting.of(s).uses_model]
        for is_measured, ask in ((True, speeds.measured_speedup), (False, predictions.predicted_speedup)):
            asked = {name: self._once(ask, Cell(target, draft, name, workload)) for name in names}
            found = {name: interval for name, interval in asked.items() if interval}
            if found:
                name = max(found, key=lambda name: found[name].value)
                said = speeds.outcome(found[name], noise)
                return Best(target, draft, workload, name, found[name], is_measured, said, plain)
        return Best(target, draft, workload, "", None, False, None, plain)

    def _with_or_without(self, ask: _Ask, cell: Cell) -> Interval | None:
        found = self._once(ask, cell)
        if found is None and cell.draft is not None and not Setting.of(cell.setting).uses_model:
            found = self._once(ask, cell._replace(draft=None))
        return found

    def _once(self, ask: _Ask, cell: Cell) -> Interval | None:
        if (ask, cell) not in self._known:
            self._known[ask, cell] = ask(self.results, cell)
        return self._known[ask, cell]


def _noise(results: Results, cell: Cell) -> Interval | None:
    return speeds.noise(results, cell.target, cell.workload)
