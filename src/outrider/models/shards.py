"""Models that are split over several files: x-00001-of-00003.gguf and its siblings."""

from __future__ import annotations

import re
import stat
from pathlib import Path, PurePosixPath

from outrider.core.errors import ModelFileError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def shard_names(name: str) -> tuple[str, ...]:
    """The file names of the model that `name` is a part of, the first part first.

    `name` may have folders before it. A model in one file is its own only name.

    >>> shard_names("q8/m-00002-of-00002.gguf")
    ('q8/m-00001-of-00002.gguf', 'q8/m-00002-of-00002.gguf')
    """
    path = PurePosixPath(name)
    match = _SHARD.fullmatch(path.name)
    if not match:
        return (name,)
    index, count = int(match["index"]), int(match["count"])
    if not 1 <= index <= count:
        return (name,)
    parts = (f"{match['stem']}-{i:05d}-of-{match['count']}{match['suffix']}" for i in range(1, count + 1))
    return tuple(str(path.with_name(part)) for part in parts)


def local_shards(path: Path) -> tuple[Path, ...]:
    """The files of a model on this machine, the first part first; all of them are there.

    `path` names the model's file or any of its parts. Raises ModelFileError when it is
    missing, a directory, or lacks some of its siblings.
    """
    _check_file(path)
    parts = tuple(path.with_name(name) for name in shard_names(path.name))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        reason = f"it is one of {len(parts)} parts, and {len(missing)} of them are missing: {names}"
        raise ModelFileError(str(path), reason, f"Put all parts into {path.parent}.")
    return parts


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        inside = sorted(child.name for child in path.glob("*.gguf")) if path.is_dir() else None
    except PermissionError:
        raise ModelFileError(str(path), "it may not be read", "Check the permissions on its way.") from None
    except (OSError, ValueError):
        raise ModelFileError(str(path), "there is no such file", _way_to(path)) from None
    if inside is None and not stat.S_ISREG(mode):
        raise ModelFileError(str(path), "it is a device or a pipe", "Name a .gguf file.")
    if inside is not None:
        names = f"Name a file in it: {', '.join(inside[:5])}." if inside else "Name a .gguf file."
        raise ModelFileError(str(path), "it is a directory", names)


def _way_to(path: Path) -> str:
    looks_like_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", str(path)) and path.suffix != ".gguf"
    return (
        f"Check the path; a repository of the hub is written hf:{path}."
        if looks_like_hub
        else "Check the path."
    )
