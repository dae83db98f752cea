"""Step records as JSON lines, one object a step: what `--trace` writes and a replay reads.

The keys are those of `StepRecord`. `outrider run` puts the answer and what each draft model offers at
every position of it after them (`outrider.lab.recording`). Distributions of sampled drafts are left
out: they would be most of the file, and what was offered and what became of it is there without them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.core.data import Draft, StepRecord
from outrider.core.files import write_whole


def as_json(record: StepRecord) -> dict[str, Any]:
    """A record as plain data."""
    draft = record.draft
    fields = asdict(replace(record, draft=Draft()))
    fields["draft"] = {
        "tokens": draft.tokens,
        "sources": draft.sources,
        "acceptance": draft.acceptance,
        "evidence": [token.evidence for token in draft.items],
        "sampled": draft.probs is not None,
    }
    return fields


def write_trace(
    path: Path, records: Iterable[StepRecord], recordings: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Write the records to `path`, then what a replay needs besides, a line each: all of it or, with
    SettingError, nothing."""
    objects = [*map(as_json, records), *recordings]
    lines = (json.dumps(data, separators=(",", ":")) + "\n" for data in objects)
    write_whole(path, "".join(lines), "trace")
