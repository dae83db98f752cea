"""What the rows of a run say about one target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from outrider.lab.loaded import LoadedTarget
from outrider.lab.predict import Prices
from outrider.lab.prompts import Workload
from outrider.lab.record import Case, cases_of, recording_of
from outrider.lab.recording import Offers, Recording
from outrider.lab.rows import (
    AnswerRow,
    CostsRow,
    ModelRow,
    OffersRow,
    PairRow,
    Role,
    Row,
    SkippedRow,
)

_R = TypeVar("_R")

MIN_TOKENS = 8
"""Shorter answers are left out: nothing can be saved on them, and a mean over cases would be theirs."""


class Rows(Protocol):
    """Rows that can be added to: a store on disk, or what a piece of work elsewhere knows and finds out."""

    @property
    def rows(self) -> Sequence[Row]: ...

    def append(self, row: Row) -> None: ...


class Ledger:
    """Reads the rows about one target, and adds to them.

    Of rows that hold for a kind of machine it knows those of `machine` alone (empty: the one of the head).
    """

    def __init__(
        self, store: Rows, target: LoadedTarget, workloads: Sequence[Workload], machine: str = ""
    ) -> None:
        self.target = target
        self.name = target.name
        self.workloads = workloads
        self.machine = machine
        self._store = store

    @property
    def rows(self) -> Sequence[Row]:
        """All there are, about other targets and machines too."""
        return self._store.rows

    def append(self, row: Row) -> None:
        """Add a row; one that holds for a kind of machine does so for the ledger's."""
        is_local = not self.machine or not hasattr(row, "machine")
        self._store.append(row if is_local else row.model_copy(update={"machine": self.machine}))

    def of(self, kind: type[_R], **fields: object) -> list[_R]:
        """The rows of a kind about this target, or about no target, whose fields have these values."""
        return [
            row
            for row in self.rows
            if isinstance(row, kind)
            and getattr(row, "target", self.name) == self.name
            and getattr(row, "machine", self.machine) == self.machine
            and all(getattr(row, name) == value for name, value in fields.items())
        ]

    def skip(self, what: str, why: str) -> None:
        """Say once that something takes no part."""
        what += f" on {self.machine}" if self.machine else ""
        if not self.of(SkippedRow, what=what):
            self.append(SkippedRow(what=what, why=why))

    def note_model(self, row: ModelRow) -> None:
        """Write down a model in its role under its backend, once; a head beside its target."""
        if not self.of(ModelRow, model=row.model, role=row.role, backend=row.backend, beside=row.beside):
            self.append(row)

    def cases(self, workload: Workload) -> list[tuple[Case, AnswerRow]]:
        """The cases of a workload that were answered at some length, in their order."""
        rows = self.answered(workload.name)
        known = [(case, rows[case.id]) for case in cases_of(workload) if case.id in rows]
        return [(case, row) for case, row in known if len(row.tokens) >= MIN_TOKENS]

    def answered(self, workload: str) -> dict[str, AnswerRow]:
        """The answers of a workload by their cases, empty ones too."""
        return {row.case: row for row in self.of(AnswerRow, workload=workload)}

    def all_cases(self) -> list[tuple[Case, AnswerRow]]:
        """Those of all workloads."""
        return [pair for workload in self.workloads for pair in self.cases(workload)]

    def prices(self, draft: str | None) -> Prices:
        """The costs in force for a pair."""
        mine = self.costs(self.name, "target")
        assert mine is not None
        theirs = None if draft is None else self.costs(draft, "draft")
        pair = self.pair(draft) if draft is not None else None
        prior = pair.prior if pair is not None else None
        drafts = None if theirs is None else theirs.costs()
        model = self.target.model
        return Prices(mine.costs(), drafts, mine.own_s, mine.own_token_s, prior, model.rewinding)

    def costs(self, model: str, role: Role) -> CostsRow | None:
        """The costs of the target, or of a draft model beside it."""
        beside = self.name if role == "draft" else None
        return next(iter(self.of(CostsRow, model=model, role=role, beside=beside)), None)

    def pair(self, draft: str) -> PairRow | None:
        """How a draft's tokenizer lines up, if that is known."""
        return next(iter(self.of(PairRow, draft=draft)), None)

    def scored(self, workload: Workload, draft: str | None) -> list[Recording]:
        """The answers of a workload as recordings with the offers of a draft; those without offers are left
        out."""
        rows = self.of(OffersRow, draft=draft, workload=workload.name) if draft else []
        offers = {r.case: {"draft": Offers(r.tokens, r.confidence, r.departures)} for r in rows}
        return [
            recording_of(self.target, case, answer, offers.get(answer.case, {}))
            for case, answer in self.cases(workload)
            if draft is None or answer.case in offers
        ]
