"""What is kept in the user's cache: entries in JSON, named by the content of model files where these matter.

An entry that cannot be read is passed over and replaced, with a line that says so.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from datetime import date
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError, SettingError
from outrider.core.files import parse_json, reason_of, write_whole
from outrider.core.notices import notify
from outrider.models.hub import cache_dir
from outrider.models.reference import local_shards

_SAMPLES, _SAMPLE_BYTES = 512, 8 * 2**10
_CAUSES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""of a cache that cannot be read or written, which the system names well"""


def fingerprint(path: Path) -> str:
    """Names a model's content quickly: the size of each of its files and a hash of many small parts, evenly
    spread, since two trainings of one model may differ in few tensors. Good enough to tell models apart, not
    to certify one. Raises ModelFileError."""
    states = []
    for file in local_shards(path):
        status = file.stat()
        states.append((file, status.st_size, status.st_mtime_ns))
    return _fingerprint(tuple(states))


@cache
def _fingerprint(states: tuple[tuple[Path, int, int], ...]) -> str:
    digest = blake2b(digest_size=16)
    for file, size, _changed_ns in states:
        digest.update(f"{size}\n".encode())
        try:
            with file.open("rb") as stream:
                for i in range(_SAMPLES):
                    stream.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelFileError(str(file), reason_of(error), "Check the file, and start again.") from error
    return digest.hexdigest()


def read_entry(path: Path, consequence: str = "") -> dict[str, Any] | None:
    """A JSON object, if there is one that can be used; a notice says what follows from it, if anything."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        line = _unusable(error)
    except ValueError:
        line = f"{path} cannot be read: {consequence}"
    else:
        if isinstance(data, dict):
            return data
        line = f"{path} holds something else: {consequence}"
    notify(line if consequence else None)
    return None


def _unusable(error: BaseException | None) -> str:
    reason = "something else is in its place"
    if isinstance(error, OSError) and error.errno in _CAUSES:
        reason = os.strerror(error.errno).lower()
    return f"the cache in {cache_dir()} cannot be used ({reason}): what is measured is not kept"


def write_entry(path: Path, data: Mapping[str, Any], *, quiet: bool = False) -> None:
    """Write a JSON object into the cache; where that is impossible, a notice says so (unless `quiet`)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n", "entry")
    except (OSError, SettingError) as error:
        line = _unusable(error.__cause__ if isinstance(error, SettingError) else error)
        notify(None if quiet else line)


def is_first_today(what: str) -> bool:
    """Whether this is asked for the first time today, which is noted in the cache."""
    path, today = cache_dir() / "said.json", date.today().isoformat()
    said = read_entry(path) or {}
    if said.get(what) == today:
        return False
    write_entry(path, {**said, what: today}, quiet=True)
    return True
