"""The source of a library: fetched by the user's package client, checked, unpacked."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.core.errors import BuildError
from outrider.models.hashing import file_sha256
from outrider.models.package_clients import fetch_source
from outrider.native.place import Source, disk_full, is_full

__all__ = ["fetched"]


def fetched(source: Source, folder: Path, progress: Callable[[float], None]) -> Path:
    """The folder of the source that is compiled, somewhere below `folder`.

    `progress` is called with the part of it that is there, from 0 to 1. Raises BuildError.
    """
    failures = fetch_source(
        source.requirement,
        source.sha256,
        folder,
        source.archive_bytes,
        lambda done, total: progress(done / total),
    )
    if failures and is_full(failures):
        raise disk_full()
    if failures:
        raise BuildError(
            source.requirement,
            f"its source could not be fetched: {failures}",
            "With network access and pip or uv, run the same command again.",
        )
    for archive in folder.rglob("*.tar.gz"):
        _unpack(source, archive, folder / "unpacked")
    for found in folder.rglob(f"{source.folder}/CMakeLists.txt"):
        return found.parent
    raise BuildError(source.requirement, f"there is no {source.folder} in its source", _TRY_AGAIN)


_TRY_AGAIN = "Try again, or check the package index in use."


def _unpack(source: Source, archive: Path, folder: Path) -> None:
    if file_sha256(archive) != source.sha256:
        reason = "what was fetched is not the published source (its SHA-256 differs)"
        raise BuildError(source.requirement, reason, _TRY_AGAIN)
    # The first releases of Python 3.11 have no filters. The hash has said that this is the archive
    # which is known, so the filter is a second lock on the door.
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(folder, **safe)
    except tarfile.TarError as error:
        raise BuildError(
            source.requirement, f"its source cannot be unpacked ({error})", _TRY_AGAIN
        ) from error
