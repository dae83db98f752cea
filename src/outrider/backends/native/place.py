"""Which build of ik_llama.cpp is for this machine's CPU, and where it lies."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.backends.machine import cpu_id
from outrider.models.hub import cache_dir

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
