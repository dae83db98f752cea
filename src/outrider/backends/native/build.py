"""Compiling a library for this CPU: fetched, built, tried, and only then put in its place."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.backends.native.compilation import Compilation, Progress, kept_log
from outrider.backends.native.tools import (
    IK,
    RECIPE,
    Source,
    builds_dir,
    check_compilers,
    cpu_id,
    disk_full,
    library_path,
    native_library,
)
from outrider.core.errors import BuildError, SettingError

__all__ = ["NativeBuild", "Progress", "build_native", "hint_once"]

_TEMPORARY = ".build-"
_NEEDED_BYTES = 500_000_000
_HINT = (
    "`outrider setup --native` compiles ik_llama.cpp for this CPU in some minutes; on the machines where "
    "that was measured, such a build was 1.1 to 1.25x as fast as the ready-made one"
)


@dataclass(frozen=True, slots=True)
class NativeBuild:
    """A finished library. `built` says whether it was built now; `seconds` is what compiling it took."""

    path: Path
    built: bool
    seconds: float = 0.0


def build_native(
    model: Path,
    *,
    force: bool = False,
    progress: Progress = lambda _stage, _done: None,
    source: Source = IK,
    recipe: Path = RECIPE,
) -> NativeBuild:
    """The library of `source` for this CPU, built unless it is there already or with `force`.

    `model` is what it must decode with before it counts as finished; the call is made in a child
    process. Whatever ends the build, Ctrl-C and a full disk among it, leaves what was there before.
    Raises BuildError, and SettingError where the cache cannot be written.
    """
    place = library_path(source, recipe)
    if place.is_file() and not force:
        return NativeBuild(place, built=False)
    check_compilers(source.name, os.environ)
    try:
        with _work_folder(source) as work:
            compilation = Compilation(source, recipe, work, progress)
            library, seconds = compilation.library()
            compilation.check_first_decode(library, model)
            place.parent.mkdir(exist_ok=True)
            library.replace(place)
            kept_log().unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_store(error) from error
    return NativeBuild(place, built=True, seconds=seconds)


@contextmanager
def _work_folder(source: Source) -> Iterator[Path]:
    """A folder on the cache's own disk, gone at the end; so are those of builds that were killed.

    One build at a time: two would take turns at the memory, and the second finds nothing left to do.
    """
    builds = builds_dir()
    builds.mkdir(parents=True, exist_ok=True)
    with (builds / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildError(source.name, "another process is building it", "Wait for it.") from error
        for left in builds.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(builds).free
        if free < _NEEDED_BYTES:
            needed = f"it needs {_NEEDED_BYTES / 1e6:.0f} MB for a while"
            reason = f"{needed}, and {builds} has {free / 1e6:.0f} MB"
            raise BuildError(source.name, reason, disk_full().way_out)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=builds, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def _cannot_store(error: OSError) -> BuildError | SettingError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full()
    reason = f"the library cannot be built there ({error.strerror or error})"
    return SettingError(
        str(builds_dir()), reason, "Check its permissions, or set OUTRIDER_CACHE to another folder."
    )


def hint_once() -> str | None:
    """A line that says, once on each machine, that a library can be compiled for its CPU. None where it was
    said before, where the library is there, where there are no compilers, and where the cache cannot keep
    that it was said."""
    if native_library() is not None:
        return None
    try:
        check_compilers(IK.name, os.environ)
        builds_dir().mkdir(parents=True, exist_ok=True)
        # The cache may be shared between machines.
        (builds_dir() / f"hint-{cpu_id()}").open("x").close()
    except (BuildError, OSError):
        return None
    return _HINT
