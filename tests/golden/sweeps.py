"""What the report says of the stored sweeps: its figures as data, and every exported column."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from golden.commands import program
from golden.normal import rounded

__all__ = ["sweeps"]

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "sweep" / "results"
_RUNS = ("sweep",)


def sweeps() -> Any:
    """`outrider bench report --json` of the stored rows, and a digest of each column of the export."""
    found = {}
    for name in _RUNS:
        report = program("bench", "report", str(_FOLDER / name), "--json")
        assert report["status"] == 0, report["err"]
        summary = report["out"]
        summary["folder"] = name
        found[name] = {"summary": rounded(summary), "columns": _columns(_FOLDER / name)}
    return found


def _columns(run: Path) -> dict[str, str]:
    """How many values a column holds, their sum where they are numbers, and a digest of them in order."""
    with TemporaryDirectory() as folder:
        table = Path(folder) / "rows.csv"
        program("bench", "export", str(run), "--to", str(table))
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    return {name: _digest(row[name] for row in rows) for name in rows[0]}


def _digest(values: Iterable[str]) -> str:
    texts = [_plain(value) for value in values]
    filled = sum(bool(text) for text in texts)
    digest = sha256("\n".join(texts).encode()).hexdigest()[:16]
    return f"{filled} of {len(texts)} values, digest {digest}"


def _plain(text: str) -> str:
    """A number at 6 digits, a text as it is."""
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return text
