"""A run as one flat table, for other tools: every request that ran, and every prediction."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError, SettingError
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench.results import Results
from outrider.lab.models import OWN_HEAD

_GROUPS = (
    "kind run_started target target_fingerprint backend draft draft_fingerprint setting workload case block",
    "machine repetition order started_s tokens prefill_s decode_s plain_s tokens_per_s",
    "target_calls draft_calls drafted accepted forced drafted_by_position accepted_by_position",
    "draft_s verify_s equal divergence finish_reason seed",
)
COLUMNS = [name for names in _GROUPS for name in names.split()]
"""`kind` is "run" or "prediction", `machine` the kind of machine where there are several; in predictions
`decode_s` is the replayed time and `plain_s` that of plain decoding. Counts by position are JSON lists."""


def table(results: Results) -> list[dict[str, Any]]:
    """One flat row for each request of a complete block, then one for each predicted case, as in COLUMNS."""
    rows = [row.model_dump() for row in results.runs]
    for prediction in results.predictions:
        cell = prediction.model_dump(exclude={"cases"})
        for case in prediction.cases:
            rows.append(cell | case.model_dump() | {"decode_s": case.seconds})
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
    return [{name: row.get(name) for name in COLUMNS} for row in rows]


def export(results: Results, path: Path) -> None:
    """Write the table as CSV or JSON lines, by the file's ending: all of it or nothing.

    Raises SettingError for another ending or a place that cannot be written, InputError where there is
    nothing to write.
    """
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise SettingError(str(path), "its name says no format", "End it in .csv or .jsonl.")
    check_writable(path, "table")
    rows = table(results)
    if not rows:
        why = "nothing ran and nothing was predicted yet"
        raise InputError(f"the run of {results.head.started}", why, "Go on with the sweep first.")
    out = io.StringIO()
    if path.suffix.lower() == ".csv":
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    write_whole(path, out.getvalue(), "table")
