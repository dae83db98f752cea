"""An index of a corpus as a file: written whole or not at all, mapped into memory to be read.

Layout: the laid out texts, the sorted places, a JSON footer, and the footer's length, a checksum of
all before it and the mark that ends every index of this version and byte order.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from struct import calcsize, pack, unpack

import numpy as np

from outrider.core.errors import InputError, SettingError
from outrider.drafters.contexts import BYTES, ContextIndex, Laid, Places
from outrider.models.cache import cache_dir

_MARK = f"outrider corpus 1 {sys.byteorder}".ljust(24).encode()
_TRAILER = "<QI24s"
_UNUSED_S = 30 * 24 * 3600.0
_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class About:
    """What an index was made of. `sources` and `tokenizer` must match for it to be used."""

    sources: str
    tokenizer: str
    num_files: int
    num_tokens: int
    skipped: dict[str, int]


class DamagedIndex(InputError):
    """An index file is not what was once written."""


def folder() -> Path:
    """Where indexes are kept, for this user alone. Raises SettingError where that cannot be."""
    place = cache_dir() / "corpus"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = place.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(0, "it belongs to another user")
        place.chmod(0o700)
    except OSError as error:
        raise SettingError(
            str(place),
            f"the corpus index cannot be kept there ({(error.strerror or str(error)).lower()})",
            "Set OUTRIDER_CACHE to a folder of your own.",
        ) from error
    return place


def save(path: Path, laid: Laid, places: Places, about: About) -> None:
    """Write an index. Of two processes that write the same one, the later wins; both are whole.

    Raises SettingError where it cannot be written.
    """
    footer = json.dumps(asdict(about) | {"num_stored": len(laid), "num_places": len(places)}).encode()
    parts = [laid.tobytes(), places.tobytes(), footer]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    trailer = pack(_TRAILER, len(footer), checksum, _MARK)
    try:
        handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:  # mkstemp: for the owner alone
                for part in (*parts, trailer):
                    file.write(part)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        reason = f"the corpus index could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(
            str(path.parent), reason, "Free some space, or set OUTRIDER_CACHE to a larger disk."
        ) from error


def load(path: Path) -> tuple[ContextIndex, About]:
    """Map an index into memory, read through once to check that it is whole.

    Raises FileNotFoundError, and DamagedIndex for anything that `save` did not write.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid():
            raise _damaged(path, "it belongs to another user")
        if found.st_size < calcsize(_TRAILER):
            raise _damaged(path, "it is too short")
        stored = mmap(file.fileno(), 0, access=ACCESS_READ)
    end = len(stored) - calcsize(_TRAILER)
    footer_bytes, checksum, mark = unpack(_TRAILER, stored[end:])
    if mark != _MARK:
        raise _damaged(path, "its last bytes are not those of an index")
    if zlib.crc32(memoryview(stored)[:end]) != checksum:
        raise _damaged(path, "its checksum is wrong")
    about = json.loads(stored[end - footer_bytes : end])
    num_stored, num_places = about.pop("num_stored"), about.pop("num_places")
    places = np.frombuffer(stored, np.int32, num_places, offset=num_stored * BYTES)
    os.utime(path)  # used: not to be swept away
    return ContextIndex(stored, places), About(**about)


def _damaged(path: Path, why: str) -> DamagedIndex:
    return DamagedIndex(str(path), why, "Remove it.")


def sweep(place: Path) -> None:
    """Remove indexes that nobody used for a month, and what broken off processes left."""
    now = time.time()
    for path in place.iterdir():
        with suppress(OSError):
            age = now - path.stat().st_mtime
            if age > (_ABANDONED_S if path.suffix == ".partial" else _UNUSED_S):
                path.unlink()
