"""The rows of a run: in its folder as JSON lines, appended one by one, and read back by kind and by cell. A
line that a kill or a full disk cut off is taken away when the run goes on, and passed over by readers."""

from __future__ import annotations

import csv
import fcntl
import gzip
import io
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from outrider.core.errors import InputError, SettingError
from outrider.core.files import check_writable, reason_of, write_whole
from outrider.core.invalid import invalid
from outrider.lab.models import OWN_HEAD
from outrider.lab.rows import (
    SCHEMA,
    AnswerRow,
    BlockRow,
    CostsRow,
    DoneRow,
    HeadRow,
    ModelRow,
    PairRow,
    PredictionRow,
    Row,
    RunRow,
    SkippedRow,
)
from outrider.lab.settings import PLAIN

_R = TypeVar("_R")

ROWS = "rows.jsonl"

_ADAPTER: TypeAdapter[Row] = TypeAdapter(Row)
_MAY_CHANGE = ("plan: minutes", "plan: repetitions")
"""when a run goes on"""
_BEGINNING = b'{"kind":"head"'
"""A file without a whole row is cut off only where it is a head's beginning: else it is somebody's."""
_NOT_OURS = "Name the folder of a run of `outrider bench`."


class Store:
    """The rows of one run, on disk and in `rows`."""

    def __init__(self, folder: Path, file: FileIO, rows: list[Row]) -> None:
        self.folder = folder
        self.rows = rows
        self._file = file

    @classmethod
    def open(cls, folder: Path, head: HeadRow) -> Self:
        """Begin a run in `folder`, or go on with the one that is there. Raises SettingError where that has
        another plan, where another process is at work on it, or where nothing can be written; InputError
        where its rows cannot be read."""
        path = folder / ROWS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        except OSError as error:
            why = reason_of(error)
            raise SettingError(str(path), why, "Name a folder that can be written (-o).") from error
        try:
            _lock(file, folder)
            rows, size = _parse(file.readall(), path)
            file.truncate(size)
            file.seek(size)
            store = cls(folder, file, rows)
            if not rows:
                store.append(head)
            _check_same(rows[0], head, folder)
        except BaseException:
            file.close()
            raise
        return store

    def append(self, row: Row) -> None:
        """Add a row. Raises SettingError, and leaves the file as it was, where it cannot be written."""
        plain = row.model_dump(mode="json", exclude_defaults=not isinstance(row, HeadRow))
        data = (json.dumps({"kind": row.kind, **plain}, separators=(",", ":")) + "\n").encode()
        start = self._file.tell()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            self._file.truncate(start)
            self._file.seek(start)
            why = f"a row could not be written ({reason_of(error)})"
            way_out = "Free some space and run it again: it goes on where it was."
            raise SettingError(str(self.folder / ROWS), why, way_out) from error
        self.rows.append(row)

    def close(self) -> None:
        self._file.close()


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run, its head first; a last line that was cut off is passed over. They may be packed
    (rows.jsonl.gz). Raises InputError where there is no run, or where a row cannot be read."""
    path = folder / ROWS if folder.is_dir() else folder
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        path = packed
    try:
        data = path.read_bytes()
        rows, _ = _parse(gzip.decompress(data) if path.suffix == ".gz" else data, path)
    except (OSError, EOFError, zlib.error) as error:
        why = reason_of(error)
        raise InputError(str(path), why.lower(), _NOT_OURS) from error
    if not rows:
        raise InputError(str(path), "it holds no rows", _NOT_OURS)
    return rows


def _lock(file: FileIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "another process is at work on this run"
        raise SettingError(str(folder), why, "Wait for it, or name another folder (-o).") from error


def _parse(data: bytes, path: Path) -> tuple[list[Row], int]:
    whole = data[: data.rfind(b"\n") + 1]
    rows = [_row(line, f"{path}, line {number}") for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
    head = rows[0] if rows else None
    is_begun = not whole and (data.startswith(_BEGINNING) or _BEGINNING.startswith(data))
    if not isinstance(head, HeadRow) and not is_begun:
        raise InputError(str(path), "it does not begin with the head of a run", _NOT_OURS)
    if isinstance(head, HeadRow) and head.schema_version != SCHEMA:
        why = f"its schema is {head.schema_version!r}, not {SCHEMA!r}"
        raise InputError(str(path), why, "Read it with the version of Outrider that wrote it.")
    return rows, len(whole)


def _row(line: bytes, where: str) -> Row:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        raise InputError(where, f"it is not a row: {invalid(error)}", _NOT_OURS) from None


def _check_same(first: Row, head: HeadRow, folder: Path) -> None:
    assert isinstance(first, HeadRow)
    now, then = (json.loads(row.model_dump_json()) for row in (head, first))
    different = [
        f"{part}: {name}"
        for part in ("plan", "prompts")  # of workloads too: a file may have been edited since
        for name, value in now[part].items()
        if f"{part}: {name}" not in _MAY_CHANGE and then[part].get(name) != value
    ]
    same = ("cpu", "physical_cores", "devices", "llama_cpp", "outrider")
    different += [key for key in same if then["machine"].get(key) != now["machine"].get(key)]
    if different:
        why = f"it holds a run with another {', '.join(different)}"
        raise SettingError(str(folder), why, "Name another folder (-o), or run it as it was.")


# Read back


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


@dataclass(frozen=True, eq=False)
class Results:
    """A run's rows. Of two rows about the same thing the later one counts; `runs` are those of complete
    blocks, every request of a block once. Figures are kept for each object: its rows do not change."""

    head: HeadRow
    models: tuple[ModelRow, ...]
    pairs: tuple[PairRow, ...]
    answers: tuple[AnswerRow, ...]
    costs: tuple[CostsRow, ...]
    predictions: tuple[PredictionRow, ...]
    runs: tuple[RunRow, ...]
    skipped: tuple[SkippedRow, ...]
    done: tuple[DoneRow, ...]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The run in this folder. Raises InputError where there is none."""
        return cls.of(read_rows(folder))

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Results:
        """These rows, in the order in which they were written."""
        [head] = [row for row in rows if isinstance(row, HeadRow)]
        return cls(
            head=head,
            models=_last(rows, ModelRow, "model", "role", "backend", "beside"),
            pairs=_last(rows, PairRow, "target", "draft"),
            answers=_last(rows, AnswerRow, "target", "workload", "case"),
            costs=_last(rows, CostsRow, "model", "role", "beside"),
            predictions=_last(rows, PredictionRow, "target", "draft", "workload", "setting"),
            runs=_counted(rows),
            skipped=_last(rows, SkippedRow, "what", "why"),
            done=_last(rows, DoneRow, "target"),
        )

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.model for row in self.models if row.role == "target"))

    @cached_property
    def drafts(self) -> tuple[str, ...]:
        """Those that line up with some target."""
        return tuple(dict.fromkeys(row.model for row in self.models if row.role == "draft"))

    @cached_property
    def workloads(self) -> tuple[str, ...]:
        used: list[AnswerRow | PredictionRow | RunRow] = [*self.answers, *self.predictions, *self.runs]
        return tuple(dict.fromkeys(row.workload for row in used))

    @cached_property
    def pooled_first(self) -> list[str | None]:
        """All workloads pooled (None) and then each; just the one where there are no others."""
        return [*self.workloads] if len(self.workloads) == 1 else [None, *self.workloads]

    @property
    def pooled(self) -> str | None:
        """What figures over everything are over: the first of `pooled_first`."""
        return self.pooled_first[0]

    @cached_property
    def columns(self) -> list[str | None]:
        """None for targets without a draft model; then the drafts."""
        return [None, *self.drafts]

    def columns_of(self, target: str) -> list[str | None]:
        """The columns of one target, without drafts that do not line up with it and others' own heads."""
        unusable = {pair.draft for pair in self.pairs if pair.target == target and not pair.usable}
        heads = [row for row in self.models if row.beside is not None]
        unusable |= {row.model for row in heads} - {row.model for row in heads if row.beside == target}
        return [draft for draft in self.columns if draft not in unusable]

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

    def model(self, name: str, target: str) -> ModelRow | None:
        """The row of a target or of its draft; of a head that beside this target."""
        return next((row for row in self.models if row.model == name and row.beside in (None, target)), None)

    def backend(self, target: str) -> str:
        """The native library that ran a target; empty where that is not known."""
        row = self.model(target, target)
        return row.backend if row else ""


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


# As one flat table, for other tools


def table(results: Results) -> list[dict[str, Any]]:
    """One flat row for each request of a complete block, then one for each predicted case, all with the same
    columns. In predictions (`kind`) `decode_s` is the replayed time, and `plain_s` that of plain decoding.
    Counts by position are JSON lists."""
    rows = [row.model_dump() for row in results.runs]
    for prediction in results.predictions:
        cell = prediction.model_dump(exclude={"cases"})
        for case in prediction.cases:
            fields = case.model_dump()
            rows.append(cell | fields | {"decode_s": fields.pop("seconds")})
    prints = {row.model: row.fingerprint for row in results.models}
    for row in rows:
        is_timed = row["decode_s"] > 0 and row["tokens"]
        row |= {
            "run_started": results.head.started,
            "target_fingerprint": prints.get(row["target"]),
            "backend": results.backend(row["target"]) or None,
            "draft_fingerprint": prints.get(row["target" if row["draft"] == OWN_HEAD else "draft"]),
            "tokens_per_s": row["tokens"] / row["decode_s"] if is_timed else None,
        }
        for name in ("drafted", "accepted"):
            row |= {name: sum(row[name]), f"{name}_by_position": json.dumps(row[name])}
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def export(results: Results, path: Path) -> None:
    """Write the table as CSV or JSON lines, by the file's ending: all of it or nothing. Raises SettingError
    for another ending or a place that cannot be written, InputError where there is nothing to write."""
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise SettingError(str(path), "its name says no format", "End it in .csv or .jsonl.")
    check_writable(path, "table")
    rows = table(results)
    if not rows:
        why = "nothing ran and nothing was predicted yet"
        raise InputError(f"the run of {results.head.started}", why, "Go on with the sweep first.")
    out = io.StringIO()
    if path.suffix.lower() == ".csv":
        writer = csv.DictWriter(out, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    write_whole(path, out.getvalue(), "table")
