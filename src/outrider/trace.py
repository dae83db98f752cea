"""Step records as JSON lines, one object a step: what `--trace` writes and a replay reads.

The keys are those of `StepRecord`. Distributions of sampled drafts are left out: they would be
most of the file, and what was offered and what became of it is there without them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.core.data import StepRecord
from outrider.core.errors import SettingError


def as_json(record: StepRecord) -> dict[str, Any]:
    """A record as plain data."""
    fields = asdict(replace(record, draft=replace(record.draft, probs=None, beliefs=())))
    fields["draft"]["sampled"] = record.draft.probs is not None
    del fields["draft"]["probs"], fields["draft"]["beliefs"]
    return fields


def check_writable(path: Path) -> None:
    """Raise SettingError where a trace could not be written in the end."""
    if path.is_dir():
        raise SettingError(str(path), "it is a folder", "Name a file for the trace.")
    if not path.absolute().parent.is_dir():
        raise SettingError(str(path), "its folder does not exist", "Create it, or name another file.")
    # A file is replaced as a whole, which its folder must allow; a device or a pipe is written to.
    needed = [path] if path.exists() else []
    if not needed or path.is_file():
        needed.append(path.resolve().parent)
    if not all(os.access(place, os.W_OK) for place in needed):
        raise SettingError(str(path), "it cannot be written", "Check its permissions, or name another file.")


def write_trace(path: Path, records: Iterable[StepRecord]) -> None:
    """Write the records to `path`: all of them or, with SettingError, nothing."""
    lines = [json.dumps(as_json(record), separators=(",", ":")) + "\n" for record in records]
    try:
        if path.exists() and not path.is_file():
            _write(path, lines)  # a device or a pipe, which must stay what it is
        else:
            _replace(path.resolve(), lines)
    except OSError as error:
        raise SettingError(str(path), f"the trace could not be written ({error.strerror})") from error


def _replace(path: Path, lines: Iterable[str]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        _write(partial, lines)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
