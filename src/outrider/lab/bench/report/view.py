"""A run's figures as the report shows them: rows of targets, columns of drafts, workloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from outrider.core.numbers import Interval
from outrider.lab.bench.results import Cell, Results
from outrider.lab.bench.summary import speeds
from outrider.lab.settings import PLAIN


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
    def is_faster(self) -> bool:
        """Whether it is faster than plain decoding, or most likely so."""
        is_above = self.speedup is not None and self.speedup.value > 1
        return self.outcome == "faster" or (self.outcome == "unsettled" and is_above)

    @property
    def said(self) -> str:
        """The verdict in a word or two."""
        if self.speedup is None:
            return "not known"
        return f"{self.outcome}" if self.is_measured else f"≈ predicted: {self.outcome}"


def draft_name(draft: str | None) -> str:
    """A draft as a column's head."""
    return "no draft model" if draft is None else draft


def workload_name(workload: str | None) -> str:
    """A workload as people read it."""
    return "all workloads" if workload is None else workload


def names(cell: Cell) -> dict[str, str]:
    """The columns of a table that say what a figure is about."""
    target, draft, setting, workload = cell
    named = {"target": target, "draft": draft_name(draft), "workload": workload_name(workload)}
    return {**named, "setting": setting}


class View:
    """A run's results, cut as the report shows them."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @cached_property
    def columns(self) -> list[str | None]:
        """None for the target without a draft model, unless the plan left that out; then the drafts."""
        alone = self.results.head.plan.get("lookup_only", True) or not self.results.drafts
        return [None, *self.results.drafts] if alone else [*self.results.drafts]

    def columns_of(self, target: str) -> list[str | None]:
        """The columns of one target, without drafts that do not line up with it and others' own heads."""
        unusable = {pair.draft for pair in self.results.pairs if pair.target == target and not pair.usable}
        heads = [row for row in self.results.models if row.beside is not None]
        unusable |= {row.model for row in heads} - {row.model for row in heads if row.beside == target}
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
        outcomes = {row.cell: row.outcome for row in speeds.verdicts(self.results, measured)}
        return {
            key: replace(best, outcome=outcomes.get(best.cell, best.outcome)) for key, best in found.items()
        }

    def _best(self, target: str, draft: str | None, workload: str | None) -> Best:
        setting, speedup, is_measured = speeds.fastest(self.results, target, draft, workload)
        plain = speeds.plain_speed(self.results, target, workload)
        noise = speeds.noise(self.results, target, workload)
        said = speeds.outcome(speedup, noise) if speedup else None
        return Best(target, draft, workload, setting, speedup, is_measured, said, plain)

    def best(self, target: str, draft: str | None, workload: str | None) -> Best:
        """A target with a draft under a workload."""
        return self.bests[target, draft, workload]

    def settings(self, target: str, draft: str | None) -> list[str]:
        """What was replayed or ran for a pair, plain decoding apart, and what needs no draft model."""
        cells = [*self.results.prediction_by_cell, *self.results.runs_by_cell]
        mine = [cell for cell in cells if cell.target == target]
        names = [cell.setting for wanted in (draft, None) for cell in mine if cell.draft == wanted]
        return [name for name in dict.fromkeys(names) if name != PLAIN.name]
