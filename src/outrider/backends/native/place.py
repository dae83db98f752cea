"""What is built, and where it lies when it is finished."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.backends.native.cpu import cpu_id
from outrider.core.errors import BuildError
from outrider.models.cache import cache_dir

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
