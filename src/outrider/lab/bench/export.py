"""A run as one flat table, for other tools: every request that ran, and every prediction."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.core.errors import InputError, SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable, write_whole
from outrider.lab.bench.results import Results
from outrider.lab.models import OWN_HEAD

_GROUPS: tuple[tuple[type, str], ...] = (
    (str, "kind run_started target target_fingerprint backend draft draft_fingerprint contestant setting"),
    (str, "workload case block"),
    (str, "machine"),
    (int, "repetition order"),
    (float, "started_s"),
    (int, "tokens timed_tokens"),
    (float, "prefill_s decode_s plain_s tokens_per_s"),
    (int, "target_calls draft_calls drafted accepted forced"),
    (str, "drafted_by_position accepted_by_position"),
    (float, "draft_s verify_s"),
    (bool, "equal"),
    (int, "divergence"),
    (str, "finish_reason"),
    (int, "seed"),
)
COLUMNS: Mapping[str, type] = {name: kind for kind, names in _GROUPS for name in names.split()}
"""What each column holds. `kind` is "run" or "prediction"; `backend` is the library of our own engine,
`machine` the kind of machine where there are several; in predictions `decode_s` is the replayed time and
`plain_s` that of plain decoding. Counts by position are JSON lists."""


def table(results: Results) -> list[dict[str, Any]]:
    """One flat row for each request of a complete block, then one for each predicted case, as in COLUMNS."""
    rows = [row.model_dump() for row in results.runs]
    for prediction in results.predictions:
        cell = prediction.model_dump(exclude={"cases", "bound_s"})
        for case in prediction.cases:
            rows.append(cell | case.model_dump() | {"decode_s": case.seconds, "timed_tokens": case.tokens})
    prints = {row.model: row.fingerprint for row in results.models}
    for row in rows:
        is_timed = row["decode_s"] > 0 and row["timed_tokens"]
        row |= {
            "run_started": results.head.started,
            "target_fingerprint": prints.get(row["target"]),
            "backend": None if row.get("contestant") else results.backend(row["target"]) or None,
            "draft_fingerprint": prints.get(row["target" if row["draft"] == OWN_HEAD else "draft"]),
            "tokens_per_s": row["timed_tokens"] / row["decode_s"] if is_timed else None,
        }
        for name in ("drafted", "accepted"):
            if (counts := row[name]) is not None:
                row |= {name: sum(counts), f"{name}_by_position": json.dumps(counts)}
    return [{name: row.get(name) for name in COLUMNS} for row in rows]


def export(results: Results, path: Path) -> None:
    """Write the table as CSV or Parquet, by the file's ending: all of it or nothing.

    Raises SettingError for another ending, a place that cannot be written or a missing library, InputError
    where there is nothing to write.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise SettingError(str(path), "its ending says neither CSV nor Parquet", "Name it .csv or .parquet.")
    check_writable(path, "table")
    rows = table(results)
    if not rows:
        why = "nothing ran and nothing was predicted yet"
        raise InputError(f"the run of {results.head.started}", why, "Go on with the sweep first.")
    if suffix == ".parquet":
        require_extra(str(path), "parquet", "name a .csv file")
    write_whole(path, _csv(rows) if suffix == ".csv" else _parquet(rows), "table")


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    out = io.BytesIO()
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), out)
    return out.getvalue()
