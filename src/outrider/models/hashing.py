"""A file's SHA-256: what names it, wherever it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from outrider.core.errors import ModelFileError

_BLOCK_BYTES = 1 << 22


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """The hash in hexadecimal; `on_bytes` is called with the bytes read, block by block.

    Raises ModelFileError when the file is gone or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ModelFileError(str(path), reason, "Check the file, and start again.") from error
    return digest.hexdigest()
