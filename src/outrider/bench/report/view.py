"""What the views ask of a run's summary, each thing worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outrider.bench import summary
from outrider.bench.results import Cell as Ran
from outrider.bench.results import Results
from outrider.bench.summary.rates import paired
from outrider.lab.settings import AUTO, AUTO_LOOKUP, PLAIN, Setting
from outrider.lab.statistics import Interval, estimate

__all__ = ["Cell", "View", "automatic", "draft_name", "workload_name"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A target with a draft, or none, under a workload (None: all pooled): the fastest way to speculate, and
    how fast it is. `speedup` is measured or predicted; None where nothing is known, `setting` is then empty.
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


_Ask = Callable[..., Interval | None]
"""A function of the summary's."""


class View:
    """A run's results with the figures that the report shows more than once."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self._known: dict[tuple[str | None, ...], Interval | None] = {}

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

    @cached_property
    def cells(self) -> Mapping[tuple[str, str | None, str | None], Cell]:
        """Every target with every draft under every workload, by these three. Verdicts of what was measured
        are given for all of them together, so that none is a lucky one of many."""
        keys = [(t, d, w) for w in self.pooled_first for t in self.results.targets for d in self.columns]
        found = {key: self._cell(*key) for key in keys}
        measured = [Ran(c.target, c.draft, c.setting, c.workload) for c in found.values() if c.is_measured]
        told = {row.cell: row.outcome for row in summary.verdicts(self.results, measured)}
        for key, cell in found.items():
            ran = Ran(cell.target, cell.draft, cell.setting, cell.workload)
            if cell.is_measured and ran in told:
                found[key] = replace(cell, outcome=told[ran])
        return found

    @cached_property
    def verdicts(self) -> list[summary.CellVerdict]:
        """Of everything that ran for real, judged together."""
        return summary.verdicts(self.results)

    def cell(self, target: str, draft: str | None, workload: str | None) -> Cell:
        """A target with a draft under a workload."""
        return self.cells[target, draft, workload]

    def gain(self, cell: Cell, other: Cell) -> Interval | None:
        """How much faster one is than the other, in the same blocks; None where they share none."""
        one, two = (Ran(c.target, c.draft, c.setting, c.workload) for c in (cell, other))
        strata = paired(self.results, one, two)
        return estimate(strata).interval if strata else None

    def place(self, workload: str | None) -> int:
        """The workload's place among all: a name of it that suits any use."""
        return self.pooled_first.index(workload)

    def settings(self, target: str, draft: str | None) -> list[str]:
        """What was replayed or ran for a pair, plain decoding apart, and what needs no draft model."""
        rows = [*self.results.prediction_by_cell, *self.results.runs_by_cell]
        mine = [
            row.setting for row in rows if row.target == target and row.draft == draft and not row.contestant
        ]
        shared = [
            row.setting for row in rows if row.target == target and row.draft is None and not row.contestant
        ]
        return [name for name in dict.fromkeys([*mine, *shared]) if name != PLAIN.name]

    def plain(self, target: str, workload: str | None) -> Interval | None:
        """Tokens per second of plain decoding."""
        return self._once(summary.plain_speed, target, workload)

    def noise(self, target: str, workload: str | None) -> Interval | None:
        """Plain decoding against itself."""
        return self._once(summary.noise, target, workload)

    def measured(self, target: str, draft: str | None, setting: str, workload: str | None) -> Interval | None:
        """The speed-up of a setting that ran. What needs no draft model may have run without one only."""
        return self._with_or_without(summary.measured_speedup, target, draft, setting, workload)

    def predicted(
        self, target: str, draft: str | None, setting: str, workload: str | None
    ) -> Interval | None:
        """The speed-up of a setting by replay."""
        return self._with_or_without(summary.predicted_speedup, target, draft, setting, workload)

    def bound(self, target: str, draft: str | None, workload: str | None) -> float | None:
        """The speed-up that the best choice at every step would have given, known in hindsight."""
        found = self._once(summary.bound_speedup, target, draft, workload, automatic(draft))
        return found.value if found else None

    def _cell(self, target: str, draft: str | None, workload: str | None) -> Cell:
        """The fastest setting that ran in this cell; where none did, of those replayed."""
        plain, noise = self.plain(target, workload), self.noise(target, workload)
        for is_measured, ask in ((True, self._own_measured), (False, self._own_predicted)):
            asked = {name: ask(target, draft, name, workload) for name in self._own(target, draft)}
            found = {name: interval for name, interval in asked.items() if interval}
            if found:
                name = max(found, key=lambda name: found[name].value)
                said = summary.outcome(found[name], noise)
                return Cell(target, draft, workload, name, found[name], is_measured, said, plain)
        return Cell(target, draft, workload, "", None, False, None, plain)

    def _own(self, target: str, draft: str | None) -> list[str]:
        """Settings of a pair that use its draft model, or without one all there are."""
        return [s for s in self.settings(target, draft) if draft is None or Setting.of(s).uses_model]

    def _own_measured(self, *asked: str | None) -> Interval | None:
        return self._once(summary.measured_speedup, *asked)

    def _own_predicted(self, *asked: str | None) -> Interval | None:
        return self._once(summary.predicted_speedup, *asked)

    def _with_or_without(
        self, ask: _Ask, target: str, draft: str | None, setting: str, workload: str | None
    ) -> Interval | None:
        found = self._once(ask, target, draft, setting, workload)
        if found is None and draft is not None and not Setting.of(setting).uses_model:
            found = self._once(ask, target, None, setting, workload)
        return found

    def _once(self, ask: _Ask, *asked: str | None) -> Interval | None:
        key = (ask.__name__, *asked)
        if key not in self._known:
            self._known[key] = ask(self.results, *asked)
        return self._known[key]
