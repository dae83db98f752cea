"""What a build needs: a compiler, which must be there; the source, and cmake with ninja or make, which are
fetched by the user's package client."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.backends.native.place import Source, disk_full, is_full
from outrider.core.errors import BuildError
from outrider.models.hashing import file_sha256
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
