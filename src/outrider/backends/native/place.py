"""Which builds are for this machine, and where they lie."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.backends.machine import cpu_id
from outrider.core.errors import BuildError
from outrider.models.hub import cache_dir

RECIPE = Path(__file__).with_name("recipe")
"""The folder with the CMakeLists.txt that says how a library is compiled."""
ANY_CPU = "any"


@dataclass(frozen=True, slots=True)
class Source:
    """A source distribution, and the folder in it that is compiled to the library `target`, a name that no
    other library in the process has."""

    name: str
    version: str
    sha256: str
    archive_bytes: int
    folder: str
    target: str = "outrider-ik"

    @property
    def library(self) -> str:
        """The library's file."""
        return f"lib{self.target}.{'dylib' if sys.platform == 'darwin' else 'so'}"


IK = Source(
    name="ik-llama-cpp-python",
    version="0.1.5",
    sha256="33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad",
    archive_bytes=42_257_843,
    folder="vendor/ik_llama.cpp",
)
MAINLINE = Source(
    name="llama-cpp-python",
    version="0.3.36",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    archive_bytes=76_589_250,
    folder="vendor/llama.cpp",
    target="outrider-cuda",
)


def builds_dir() -> Path:
    """The folder of all builds."""
    return cache_dir() / "native"


def library_path(
    source: Source = IK, recipe: Path = RECIPE, *, cpu: str | None = None, cards: str = ""
) -> Path:
    """Where the finished library lies once it is built. A folder of its own for every source, way of
    compiling, CPU (None: this one) and kinds of `cards` (86+90): the cache may be shared between machines."""
    digest = sha256(f"{source.sha256} {cpu or cpu_id()}".encode())
    for file in sorted(path for path in recipe.iterdir() if path.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    name = f"{source.name}-{source.version}-{digest.hexdigest()[:12]}"
    return builds_dir() / (f"{name}-sm{cards}" if cards else name) / source.library


def native_library(source: Source = IK, recipe: Path = RECIPE) -> Path | None:
    """The finished library for this CPU and this version of Outrider; None where there is none."""
    path = library_path(source, recipe)
    return path if path.is_file() else None


def cuda_libraries(source: Source = MAINLINE, recipe: Path = RECIPE) -> list[Path]:
    """The finished libraries for NVIDIA cards that run on this CPU: those that were built for it first."""
    found = []
    for cpu in (None, ANY_CPU):
        usual = library_path(source, recipe, cpu=cpu)
        found += sorted(usual.parent.parent.glob(f"{usual.parent.name}-sm*/{source.library}"))
    return found


def disk_full() -> BuildError:
    """The error of a build that found no room."""
    way_out = "Free some space, or set OUTRIDER_CACHE to a folder on another disk."
    return BuildError(str(builds_dir()), "its disk is full", way_out)


def is_full(said: str) -> bool:
    """Whether a program says that it found no room."""
    return os.strerror(errno.ENOSPC) in said


def not_fetched(what: str, failures: str) -> BuildError:
    """The error of packages that no client could fetch."""
    if is_full(failures):
        return disk_full()
    way_out = "With network access and pip or uv, run the same command again, or install it."
    return BuildError(what, f"it could not be fetched: {failures}", way_out)
