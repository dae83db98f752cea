"""Step records as JSON lines, one object a step: what `--trace` writes and a replay reads.

The keys are those of `StepRecord`. Distributions of sampled drafts are left out: they would be
most of the file, and what was offered and what became of it is there without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.core.data import StepRecord
from outrider.files import write_whole


def as_json(record: StepRecord) -> dict[str, Any]:
    """A record as plain data."""
    fields = asdict(replace(record, draft=replace(record.draft, probs=None, beliefs=())))
    fields["draft"]["sampled"] = record.draft.probs is not None
    del fields["draft"]["probs"], fields["draft"]["beliefs"]
    return fields


def write_trace(path: Path, records: Iterable[StepRecord]) -> None:
    """Write the records to `path`: all of them or, with SettingError, nothing."""
    lines = (json.dumps(as_json(record), separators=(",", ":")) + "\n" for record in records)
    write_whole(path, "".join(lines), "trace")
