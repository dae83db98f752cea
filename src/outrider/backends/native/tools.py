"""What a build needs: a compiler, which must be there; the source, and cmake with ninja or make, which are
fetched by the user's package client. And where a finished library lies.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from outrider.backends.machine import cpu_id
from outrider.core.errors import BuildError
from outrider.models.hub import cache_dir, file_sha256
from outrider.models.package_clients import fetch_source, install_wheels

_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_CMAKE_NEEDED = (3, 19)

LIBRARY = "liboutrider-ik.dylib" if sys.platform == "darwin" else "liboutrider-ik.so"
"""The library's file and the name that it gives itself: no other library in the process has it."""

RECIPE = Path(__file__).with_name("recipe")
"""The folder with the CMakeLists.txt that says how the library is compiled."""


@dataclass(frozen=True, slots=True)
class Source:
    """A source distribution, and the folder in it that is compiled."""

    name: str
    version: str
    sha256: str
    archive_bytes: int
    folder: str


IK = Source(
    name="ik-llama-cpp-python",
    version="0.1.5",
    sha256="33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad",
    archive_bytes=42_257_843,
    folder="vendor/ik_llama.cpp",
)


def builds_dir() -> Path:
    """The folder of all builds."""
    return cache_dir() / "native"


def library_path(source: Source = IK, recipe: Path = RECIPE) -> Path:
    """Where the finished library lies once it is built. A folder of its own for every source, way of
    compiling and CPU: the cache may be shared between machines."""
    digest = sha256(f"{source.sha256} {cpu_id()}".encode())
    for file in sorted(path for path in recipe.iterdir() if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return builds_dir() / f"{source.name}-{source.version}-{digest.hexdigest()[:12]}" / LIBRARY


def native_library(source: Source = IK, recipe: Path = RECIPE) -> Path | None:
    """The finished library for this CPU and this version of Outrider; None where there is none."""
    path = library_path(source, recipe)
    return path if path.is_file() else None


def disk_full() -> BuildError:
    """The error of a build that found no room."""
    way_out = "Free some space, or set OUTRIDER_CACHE to a folder on another disk."
    return BuildError(str(builds_dir()), "its disk is full", way_out)


def is_full(said: str) -> bool:
    """Whether a program says that it found no room."""
    return os.strerror(errno.ENOSPC) in said


def check_compilers(what: str) -> None:
    """Raise BuildError where a compiler that CMake would take is not there."""
    for variable, names in _COMPILERS.items():
        given = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(map(shutil.which, given or names)):
            raise BuildError(
                what,
                f"building it needs a C and a C++ compiler, and there is no {' or '.join(given or names)}",
                "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install), or set CC and CXX. Outrider runs without this build too.",
            )


def with_tools(folder: Path, environment: Mapping[str, str], on_fetch: Callable[[], None]) -> dict[str, str]:
    """The environment, in which cmake runs with ninja or make: those of this machine; else wheels that are
    installed below `folder`, which lasts as long as the build (`on_fetch` is called before).

    Raises BuildError.
    """
    found = dict(environment)

    def has(name: str) -> bool:
        return shutil.which(name, path=found.get("PATH", os.defpath)) is not None

    missing = [] if _is_cmake_usable(found) else [f"cmake>={'.'.join(map(str, _CMAKE_NEEDED))}"]
    missing += [] if has("ninja") or has("make") else ["ninja"]
    if missing:
        on_fetch()
        if failures := install_wheels(missing, folder, lambda _done, _total: None):
            names = " and ".join(name.partition(">")[0] for name in missing)
            reason = f"{names} could not be fetched: {failures}"
            raise BuildError("build tools", reason, "Install them, or try again with network access.")
        # The wheels' programs are partly Python scripts.
        installed, python_path = folder / "installed", found.get("PYTHONPATH")
        found["PATH"] = os.pathsep.join([str(installed / "bin"), found.get("PATH", os.defpath)])
        found["PYTHONPATH"] = os.pathsep.join([str(installed), *([python_path] if python_path else [])])
    if not _is_cmake_usable(found):
        raise BuildError("build tools", "the cmake that was fetched does not start", "Install cmake.")
    return found | {"CMAKE_GENERATOR": "Ninja" if has("ninja") else "Unix Makefiles"}


def _is_cmake_usable(environment: Mapping[str, str]) -> bool:
    """Whether the cmake on PATH starts and is new enough."""
    asking = ["cmake", "--version"]
    try:
        said = subprocess.run(asking, env=environment, capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    version = re.search(r"version (\d+)\.(\d+)", said)
    return version is not None and (int(version[1]), int(version[2])) >= _CMAKE_NEEDED


def fetched(source: Source, folder: Path, progress: Callable[[float], None]) -> Path:
    """The folder of the source that is compiled, somewhere below `folder`.

    `progress` is called with the part of it that is there, from 0 to 1. Raises BuildError.
    """
    pinned = f"{source.name}=={source.version}"

    def refused(why: str, way_out: str = "Try again, or check the package index in use.") -> BuildError:
        return BuildError(pinned, why, way_out)

    expected = source.sha256, folder, source.archive_bytes
    if failures := fetch_source(pinned, *expected, lambda done, total: progress(done / total)):
        if is_full(failures):
            raise disk_full()
        way_out = "With network access and pip or uv, run the same command again."
        raise refused(f"its source could not be fetched: {failures}", way_out)
    for archive in folder.rglob("*.tar.gz"):
        if file_sha256(archive) != source.sha256:
            raise refused("what was fetched is not the published source (its SHA-256 differs)")
        # The first releases of Python 3.11 have no filters; the hash says that it is the right one.
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        try:
            with tarfile.open(archive) as opened:
                opened.extractall(folder / "unpacked", **safe)
        except tarfile.TarError as error:
            raise refused(f"its source cannot be unpacked ({error})") from error
    for found in folder.rglob(f"{source.folder}/CMakeLists.txt"):
        return found.parent
    raise refused(f"there is no {source.folder} in its source")
