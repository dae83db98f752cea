"""The files that a certificate was made with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.models.hashing import file_sha256
from outrider.models.shards import local_shards

__all__ = ["model_files"]


def model_files(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each of a model's files; `on_bytes` is told how much was read.

    Raises ModelFileError when a file is gone or cannot be read.
    """
    return [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file, on_bytes)}
        for file in local_shards(path)
    ]
