"""A run as one flat table, for other tools: every request that ran, and every prediction."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.bench.results import Results
from outrider.core.errors import InputError, SettingError
from outrider.core.extras import require_extra
from outrider.core.files import check_writable, write_whole
from outrider.lab.rows import CaseOutcome, PredictionRow, RunRow

COLUMNS: Mapping[str, type] = {
    "kind": str,
    "run_started": str,
    "target": str,
    "target_fingerprint": str,
    "backend": str,
    "draft": str,
    "draft_fingerprint": str,
    "contestant": str,
    "setting": str,
    "workload": str,
    "case": str,
    "block": str,
    "repetition": int,
    "order": int,
    "started_s": float,
    "tokens": int,
    "timed_tokens": int,
    "prefill_s": float,
    "decode_s": float,
    "plain_s": float,
    "tokens_per_s": float,
    "target_calls": int,
    "draft_calls": int,
    "drafted": int,
    "accepted": int,
    "forced": int,
    "drafted_by_position": str,
    "accepted_by_position": str,
    "draft_s": float,
    "verify_s": float,
    "equal": bool,
    "divergence": int,
    "finish_reason": str,
    "seed": int,
}
"""What each column holds. `kind` is "run" or "prediction"; `backend` is the library of
our own engine; in predictions `decode_s` is the replayed time and
`plain_s` that of plain decoding. Counts by position are JSON lists."""

_COUNTS = ("drafted", "accepted")
_OF_RUN = [name for name in COLUMNS if name in RunRow.model_fields and name not in _COUNTS]
_OF_CASE = [name for name in COLUMNS if name in CaseOutcome.model_fields and name not in _COUNTS]
_OF_PREDICTION = [name for name in COLUMNS if name in PredictionRow.model_fields]


def table(results: Results) -> list[dict[str, Any]]:
    """One flat row for each request of a complete block, then one for each predicted case, as in COLUMNS."""
    runs = [_of_run(row) for row in results.runs]
    predicted = [_of_case(row, case) for row in results.predictions for case in row.cases]
    prints = {row.model: row.fingerprint for row in results.models}
    found = []
    for row in [*runs, *predicted]:
        row |= {
            "run_started": results.head.started,
            "target_fingerprint": prints.get(row["target"]),
            "backend": None if row.get("contestant") else results.backend(row["target"]) or None,
            "draft_fingerprint": prints.get(row["draft"]),
        }
        found.append({name: row.get(name) for name in COLUMNS})
    return found


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
    if suffix == ".csv":
        write_whole(path, _csv(rows), "table")
    else:
        _write_parquet(rows, path)


def _of_run(row: RunRow) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in _OF_RUN}
    rate = row.timed_tokens / row.decode_s if row.decode_s > 0 and row.timed_tokens else None
    return {"tokens_per_s": rate} | found | _counts(row.drafted, row.accepted)


def _of_case(row: PredictionRow, case: CaseOutcome) -> dict[str, Any]:
    found = {name: getattr(case, name) for name in _OF_CASE}
    cell = {name: getattr(row, name) for name in _OF_PREDICTION}
    rate = case.tokens / case.seconds if case.seconds > 0 else None
    times = {"decode_s": case.seconds, "timed_tokens": case.tokens, "tokens_per_s": rate}
    return cell | found | times | _counts(case.drafted, case.accepted)


def _counts(drafted: tuple[int, ...] | None, accepted: tuple[int, ...] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, counts in zip(_COUNTS, (drafted, accepted), strict=True):
        if counts is not None:
            found |= {name: sum(counts), f"{name}_by_position": json.dumps(counts)}
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    require_extra(str(path), "parquet", "name a .csv file")
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
    partial = path.with_name(f"{path.name}.partial")
    try:
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), partial)
        partial.replace(path)
    except OSError as error:
        reason = f"the table could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(path), reason, "Free some space, or name another file.") from error
    finally:
        partial.unlink(missing_ok=True)
