"""Which build of ik_llama.cpp is for this machine's CPU, where it lies, and whether one could be made."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from outrider.backends.machine import cpu_id
from outrider.core.errors import BuildError
from outrider.models.hub import cache_dir

_HINT = (
    "`outrider setup --native` compiles ik_llama.cpp for this CPU in some minutes; on the machines where "
    "that was measured, such a build was 1.1 to 1.25x as fast as the ready-made one"
)
_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}

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


def hint_once() -> str | None:
    """A line that says, once on each machine, that a library can be compiled for its CPU. None where it was
    said before, where the library is there, where there are no compilers, and where the cache cannot keep
    that it was said."""
    if native_library() is not None:
        return None
    try:
        check_compilers(IK.name)
        builds_dir().mkdir(parents=True, exist_ok=True)
        # The cache may be shared between machines.
        (builds_dir() / f"hint-{cpu_id()}").open("x").close()
    except (BuildError, OSError):
        return None
    return _HINT


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
