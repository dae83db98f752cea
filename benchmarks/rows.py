"""Results as JSON lines that a later run goes on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def resume(out: Path, head: Row, same: Sequence[str]) -> list[Row]:
    """The rows behind the head that are there; begins the file with `head` where there is none.

    A line that was cut off in the middle is removed. Ends the program if the file's head differs in one
    of the `same` fields: then the rows were measured on something else.
    """
    if not out.exists() or not out.stat().st_size:
        out.write_text(json.dumps(head) + "\n", encoding="utf-8")
    whole, _, torn = out.read_text(encoding="utf-8").rpartition("\n")
    if torn:  # the run was killed while it wrote
        out.write_text(whole + "\n" if whole else json.dumps(head) + "\n", encoding="utf-8")
    first, *rows = read_rows(out)
    plain = json.loads(json.dumps(head))
    if wrong := [name for name in same if first.get(name) != plain[name]]:
        sys.exit(f"{out} was measured with other {', '.join(wrong)}: choose another --out")
    return rows


def read_rows(path: Path) -> list[Row]:
    """Every row, the head first. Ends the program, naming file and line, where that is impossible."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror or error}")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            sys.exit(f"{path}, line {number} is no JSON ({error})")
        if not isinstance(row, dict):
            sys.exit(f"{path}, line {number} is no row of results")
        rows.append(row)
    if not rows:
        sys.exit(f"{path} is empty")
    return rows


def append(path: Path, row: Row) -> None:
    """Add one row, whole, before anything else happens. Floats are kept to seven decimals."""
    rounded = json.loads(json.dumps(row), parse_float=lambda text: round(float(text), 7))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(rounded, separators=(",", ":")) + "\n")
