"""What a build needs: a compiler, which must be there; the source, and cmake with ninja or make, which are
fetched by the user's package client.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from outrider.core.errors import BuildError
from outrider.models.hub import cache_dir, file_sha256
from outrider.models.package_clients import fetch_source, install_wheels

_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}
_CMAKE_NEEDED = (3, 19)
_TRY_AGAIN = "Try again, or check the package index in use."


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of a build."""

    cmake: str
    generator: str
    environment: Mapping[str, str]


def check_compilers(what: str, environment: Mapping[str, str]) -> None:
    """Raise BuildError where a compiler that CMake would take is not there."""
    for variable, names in _COMPILERS.items():
        given = shlex.split(environment.get(variable, ""))[:1]
        if not any(_found(name, environment) for name in given or names):
            raise BuildError(
                what,
                f"building it needs a C and a C++ compiler, and there is no {' or '.join(given or names)}",
                "Install one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install), or set CC and CXX. Outrider runs without this build too.",
            )


def find_tools(folder: Path, environment: Mapping[str, str], on_fetch: Callable[[], None]) -> Tools:
    """The cmake, and the ninja or make, of this machine; else wheels that are installed below `folder`,
    which lasts as long as the build; `on_fetch` is called before. Raises BuildError."""
    missing = [] if _usable_cmake(environment) else [f"cmake>={'.'.join(map(str, _CMAKE_NEEDED))}"]
    missing += [] if _found("ninja", environment) or _found("make", environment) else ["ninja"]
    if missing:
        on_fetch()
        failures = install_wheels(missing, folder, lambda _done, _total: None)
        if failures:
            names = " and ".join(name.partition(">")[0] for name in missing)
            reason = f"{names} could not be fetched: {failures}"
            raise BuildError("build tools", reason, "Install them, or try again with network access.")
        environment = _with_programs_of(folder / "installed", environment)
    cmake = _usable_cmake(environment)
    if cmake is None:
        raise BuildError("build tools", "the cmake that was fetched does not start", "Install cmake.")
    generator = "Ninja" if _found("ninja", environment) else "Unix Makefiles"
    return Tools(cmake, generator, environment)


def _with_programs_of(installed: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with what was installed in front: the wheels' programs are partly Python scripts."""

    def first(place: Path, name: str, default: str) -> str:
        return os.pathsep.join(part for part in (str(place), environment.get(name, default)) if part)

    paths = {
        "PATH": first(installed / "bin", "PATH", os.defpath),
        "PYTHONPATH": first(installed, "PYTHONPATH", ""),
    }
    return {**environment, **paths}


def _usable_cmake(environment: Mapping[str, str]) -> str | None:
    """The cmake on PATH, where it starts and is new enough."""
    path = _found("cmake", environment)
    if path is None:
        return None
    try:
        said = subprocess.run(
            [path, "--version"], env=dict(environment), capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return None
    version = re.search(r"version (\d+)\.(\d+)", said)
    return path if version and (int(version[1]), int(version[2])) >= _CMAKE_NEEDED else None


def _found(name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environment.get("PATH", os.defpath))


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


# Which CPU this is: its name, and what matters to a library that was compiled for it.


def processor_name() -> str:
    """The processor as the system describes it."""
    names = (line.partition(":")[2].strip() for line in _cpuinfo() or () if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def logical_cores() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_id() -> str:
    """Names the CPU's instruction set: a cache folder may be shared between machines."""
    lines = _cpuinfo()
    if lines is None:
        return platform.processor() or platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return blake2b(flags.encode(), digest_size=6).hexdigest()


def _cpuinfo() -> list[str] | None:
    """The lines of /proc/cpuinfo; None where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None


# What is built, and where it lies when it is finished.

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

    @property
    def requirement(self) -> str:
        """As a package client wants it."""
        return f"{self.name}=={self.version}"


IK = Source(
    name="ik-llama-cpp-python",
    version="0.1.5",
    sha256="33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad",
    archive_bytes=42_257_843,
    folder="vendor/ik_llama.cpp",
)


def native_library(source: Source = IK, recipe: Path = RECIPE) -> Path | None:
    """The finished library for this CPU and this version of Outrider; None where there is none."""
    path = library_path(source, recipe)
    return path if path.is_file() else None


def library_path(source: Source = IK, recipe: Path = RECIPE) -> Path:
    """Where the finished library lies once it is built. A folder of its own for every source, way of
    compiling and CPU: the cache may be shared between machines."""
    return builds_dir() / f"{source.name}-{source.version}-{_key(source, recipe)}" / LIBRARY


def builds_dir() -> Path:
    """The folder of all builds."""
    return cache_dir() / "native"


def _key(source: Source, recipe: Path) -> str:
    digest = sha256(f"{source.sha256} {cpu_id()}".encode())
    for file in sorted(path for path in recipe.iterdir() if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def disk_full() -> BuildError:
    """The error of a build that found no room."""
    way_out = "Free some space, or set OUTRIDER_CACHE to a folder on another disk."
    return BuildError(str(builds_dir()), "its disk is full", way_out)


def is_full(said: str) -> bool:
    """Whether a program says that it found no room."""
    return os.strerror(errno.ENOSPC) in said
