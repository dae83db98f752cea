"""Recordings in JSON lines, one each; lines of another kind (a machine's description) are passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from outrider.lab.recording import Recording

SCHEMA = "outrider.recording/1"
_FORMAT = TypeAdapter(Recording)
_NOT_KEPT = {"constrain", "whole_ratio"}


def as_json(recording: Recording) -> dict[str, Any]:
    """A recording as plain data."""
    return {"kind": "recording", "schema": SCHEMA, **_FORMAT.dump_python(recording, exclude=_NOT_KEPT)}


def read_recordings(path: Path) -> list[Recording]:
    """The recordings of a file. Raises ValueError for a damaged one."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [_FORMAT.validate_python(line) for line in lines if line.get("schema") == SCHEMA]
