"""The folder of a run: its rows as JSON lines, appended one by one, found again by the next run.

A row is written whole or not at all, as far as that is in the program's hands; a line that a kill or a full
disk cut off is taken away when the run goes on, and passed over by readers.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import zlib
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from outrider.core.errors import InputError, SettingError
from outrider.core.files import reason_of
from outrider.core.invalid import invalid
from outrider.lab.rows import SCHEMA, HeadRow, Row

ROWS = "rows.jsonl"

_ADAPTER: TypeAdapter[Row] = TypeAdapter(Row)
_DIGITS = 9
"""of every float: nanoseconds, and probabilities finer than they are known"""
_MAY_CHANGE = ("plan: minutes", "plan: repetitions")
"""when a run goes on"""
_BEGINNING = b'{"kind":"head"'
"""A file without a whole row is cut off only where it is a head's beginning: else it is somebody's."""
_NOT_OURS = "Name the folder of a run of `outrider bench`."


class Store(AbstractContextManager["Store"]):
    """The rows of one run, on disk and in `rows`. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, file: FileIO, rows: list[Row]) -> None:
        self.folder = folder
        self.rows = rows
        self._file = file

    @classmethod
    def open(cls, folder: Path, head: HeadRow) -> Self:
        """Begin a run in `folder`, or go on with the one that is there.

        Raises SettingError where that has another plan, where another process is at work on it, or where
        nothing can be written; InputError where its rows cannot be read.
        """
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
        data = (json.dumps(_rounded({"kind": row.kind, **plain}), separators=(",", ":")) + "\n").encode()
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

    def __exit__(self, *_raised: object) -> None:
        self.close()


def read_rows(folder: Path) -> list[Row]:
    """The rows of a run, its head first; a last line that was cut off is passed over. Those of a run that is
    kept may be packed (rows.jsonl.gz).

    Raises InputError where there is no run, or where a row cannot be read.
    """
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
    """The rows of all whole lines, and the bytes that these take."""
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
    """Rows of different plans, machines or builds do not belong together."""
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
