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
    fields = asdict(replace(record, draft=replace(record.draft, probs=None)))
    fields["draft"]["sampled"] = record.draft.probs is not None
    del fields["draft"]["probs"]
    return fields


def check_writable(path: Path) -> None:
    """Raise SettingError where a trace could not be written in the end."""
    if path.is_dir():
        raise SettingError(str(path), "it is a folder", "Name a file for the trace.")
    if not path.absolute().parent.is_dir():
        raise SettingError(str(path), "its folder does not exist", "Create it, or name another file.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise SettingError(str(path), "it cannot be written", "Check its permissions, or name another file.")


def write_trace(path: Path, records: Iterable[StepRecord]) -> None:
    """Write the records to `path`: all of them or, with SettingError, nothing."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(as_json(record), separators=(",", ":")) + "\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SettingError(str(path), f"the trace could not be written ({error.strerror})") from error
