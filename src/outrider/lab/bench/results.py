"""The rows of a run, read back: by kind, without what does not count, and by cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from outrider.core.errors import InputError
from outrider.lab.bench.store import read_rows
from outrider.lab.rows import (
    AnswerRow,
    BlockRow,
    CostsRow,
    DoneRow,
    HeadRow,
    MachineRow,
    ModelRow,
    OffersRow,
    PairRow,
    PredictionRow,
    QualityRow,
    Row,
    RunRow,
    SkippedRow,
)
from outrider.lab.settings import PLAIN

_R = TypeVar("_R")
_P = ParamSpec("_P")


class Cell(NamedTuple):
    """What one figure is about. `draft` None: no draft model; `workload` None: all of them together."""

    target: str
    draft: str | None
    setting: str
    workload: str | None

    @property
    def plain(self) -> Cell:
        """Plain decoding of the same target under the same workload."""
        return Cell(self.target, None, PLAIN.name, self.workload)

    @property
    def is_plain(self) -> bool:
        return self.setting == PLAIN.name


@dataclass(frozen=True)
class Results:
    """A run's rows. Of two rows about the same thing the later one counts; `runs` are those of complete
    blocks, every request of a block once."""

    head: HeadRow
    models: tuple[ModelRow, ...]
    pairs: tuple[PairRow, ...]
    answers: tuple[AnswerRow, ...]
    costs: tuple[CostsRow, ...]
    offers: tuple[OffersRow, ...]
    quality: tuple[QualityRow, ...]
    predictions: tuple[PredictionRow, ...]
    runs: tuple[RunRow, ...]
    blocks: tuple[BlockRow, ...]
    skipped: tuple[SkippedRow, ...]
    done: tuple[DoneRow, ...]
    sheets: Mapping[str, Results] = field(default_factory=dict)
    """of a sweep on a cluster the results on each kind of machine, by its name: each has costs, predictions
    and runs of its own. What is beside them here is that of the first"""

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The run in this folder. Raises InputError where there is none, or where it has no head."""
        return cls.of(read_rows(folder), str(folder))

    @classmethod
    def of(cls, rows: Sequence[Row], source: str = "the rows") -> Results:
        """These rows, in the order in which they were written. Raises InputError without a head."""
        head = next((row for row in rows if isinstance(row, HeadRow)), None)
        if head is None:
            raise InputError(source, "they do not say what was measured", "Name the folder of a sweep.")
        if kinds := [row for row in rows if isinstance(row, MachineRow)]:
            sheets = {kind.machine: cls.of(_on(rows, kind, head), source) for kind in kinds}
            return replace(next(iter(sheets.values())), head=head, sheets=sheets)
        case = ("target", "workload", "case")
        return cls(
            head=head,
            models=_last(rows, ModelRow, "model", "role", "backend", "beside"),
            pairs=_last(rows, PairRow, "target", "draft"),
            answers=_last(rows, AnswerRow, *case),
            costs=_last(rows, CostsRow, "model", "role", "beside"),
            offers=_last(rows, OffersRow, "draft", *case),
            quality=_last(rows, QualityRow, "reference", *case),
            predictions=_last(rows, PredictionRow, "target", "draft", "workload", "setting"),
            runs=_counted(rows),
            blocks=_last(rows, BlockRow, "block"),
            skipped=_last(rows, SkippedRow, "what", "why"),
            done=_last(rows, DoneRow, "target"),
        )

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What `once` keeps."""
        return {}

    @cached_property
    def targets(self) -> tuple[str, ...]:
        named = [row.model for row in self.models if row.role == "target"]
        used: list[AnswerRow | RunRow | PredictionRow] = [*self.answers, *self.runs, *self.predictions]
        return tuple(dict.fromkeys([*named, *(row.target for row in used)]))

    @cached_property
    def drafts(self) -> tuple[str, ...]:
        named = [row.model for row in self.models if row.role == "draft"]
        used: list[PairRow | PredictionRow | RunRow] = [*self.pairs, *self.predictions, *self.runs]
        return tuple(dict.fromkeys([*named, *(row.draft for row in used if row.draft is not None)]))

    @cached_property
    def workloads(self) -> tuple[str, ...]:
        used: list[AnswerRow | PredictionRow | RunRow] = [*self.answers, *self.predictions, *self.runs]
        return tuple(dict.fromkeys(row.workload for row in used))

    @cached_property
    def runs_by_cell(self) -> Mapping[Cell, Sequence[RunRow]]:
        """Real requests, by what ran; always of a single workload."""
        found: dict[Cell, list[RunRow]] = defaultdict(list)
        for row in self.runs:
            found[Cell(row.target, row.draft, row.setting, row.workload)].append(row)
        return dict(found)

    @cached_property
    def prediction_by_cell(self) -> Mapping[Cell, PredictionRow]:
        """Predictions, by what was replayed; always of a single workload."""
        return {Cell(row.target, row.draft, row.setting, row.workload): row for row in self.predictions}

    def model(self, name: str, role: str, backend: str | None = None) -> ModelRow | None:
        """The row of a model in this role, under this backend if there is one; in the other role, where only
        that is there."""
        found = [row for row in self.models if row.model == name]
        found.sort(key=lambda row: (row.role != role, backend is not None and row.backend != backend))
        return found[0] if found else None

    def draft(self, name: str, target: str) -> ModelRow | None:
        """The row of a draft for this target, in the same library if there is one; of a head beside it."""
        heads = (row for row in self.models if (row.model, row.beside) == (name, target))
        return next(heads, None) or self.model(name, "draft", self.backend(target))

    def backend(self, target: str) -> str:
        """The native library that ran a target; empty where that is not known."""
        row = self.model(target, "target")
        return "" if row is None else row.backend

    def same_file(self, target: str) -> tuple[str, ...]:
        """The targets that are the same file, itself included: under other backends."""
        prints = {row.model: row.fingerprint for row in self.models if row.role == "target"}
        known = prints.get(target)
        return tuple(name for name in self.targets if known and prints.get(name) == known) or (target,)


def once(ask: Callable[Concatenate[Results, _P], _R]) -> Callable[Concatenate[Results, _P], _R]:
    """Works a figure out once for each run and arguments: a run's rows do not change."""

    @wraps(ask)
    def known(results: Results, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        key = (ask, args, *kwargs.items())
        if key not in results.known:
            results.known[key] = ask(results, *args, **kwargs)
        found: _R = results.known[key]
        return found

    return known


@once
def rates(results: Results, cell: Cell) -> Mapping[str, Mapping[str, float]]:
    """Seconds per token by case and block, of a cell with one workload."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in results.runs_by_cell.get(cell, ()):
        if row.tokens > 0 and row.decode_s > 0:
            found[row.case][row.block] = row.decode_s / row.tokens
    return found


def _on(rows: Sequence[Row], kind: MachineRow, head: HeadRow) -> list[Row]:
    """What holds on one kind of machine, as a run of its own."""
    facts = {**kind.facts, "kind": kind.machine}
    others = [row for row in rows if not isinstance(row, HeadRow | MachineRow)]
    mine = [row for row in others if getattr(row, "machine", "") in ("", kind.machine)]
    return [head.model_copy(update={"machine": facts}), *mine]


def _last(rows: Sequence[Row], kind: type[_R], *names: str) -> tuple[_R, ...]:
    """Rows of a kind, in order of first appearance; of those alike in these fields the last."""
    found = {tuple(getattr(row, name) for name in names): row for row in rows if isinstance(row, kind)}
    return tuple(found.values())


def _counted(rows: Sequence[Row]) -> tuple[RunRow, ...]:
    """The requests of complete blocks: of a block that was begun twice those of its last beginning."""
    ends = {row.block: place for place, row in enumerate(rows) if isinstance(row, BlockRow)}
    found: dict[str, dict[tuple[str | None, ...], RunRow]] = defaultdict(dict)
    last_s: dict[str, float] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, RunRow) or place >= ends.get(row.block, -1):
            continue
        if row.started_s < last_s.get(row.block, 0.0):  # the block's clock began again, and so did the block
            found[row.block].clear()
        last_s[row.block] = row.started_s
        found[row.block][row.draft, row.setting, row.case] = row
    return tuple(row for block in found.values() for row in block.values())
