"""Builds of a small library in the place of ik_llama.cpp, on a machine with stand-ins for the programs."""

import io
import os
import shutil
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from outrider.backends.native.build import NativeBuild, build_native
from outrider.backends.native.place import Source

PYTHON = sys.executable
COMPILER = shutil.which("cc")

CODE = "int outrider_first_decode(const char *path) { return path == 0; }\n"

# What a build does in its folder $1, with the recipe $2. It counts, as ninja does.
COMPILES = """
echo "[1/2] Building C object code.o"
"$REAL_CC" -shared -fPIC -o "$1/liboutrider-ik.so" "$2/code.c" || exit 1
echo "[2/2] Linking"
"""

CMAKE = """#!/bin/sh
case "$1" in
--version) echo "cmake version 3.30.1"; exit 0 ;;
-S*) for word; do case $word in -B*) build=${word#-B} ;; esac; done
    echo "cmake $*" >> "$STAGE/calls"; echo "${1#-S}" > "$build/recipe" ;;
--build) sh "$(cat "$2/recipe")/build.sh" "$2" "$(cat "$2/recipe")" ;;
esac
"""

# $target is where the package should go.
PIP = """#!/bin/sh
echo "pip $*" >> "$STAGE/calls"
while [ $# -gt 0 ]; do case $1 in --dest|--target) target=$2 ;; esac; shift; done
mkdir -p "$target"
"""
DELIVERS = 'cp "$STAGE/sdist.tar.gz" "$target/tiny_ik-1.0.tar.gz"\n'


def archive_of(files: Mapping[str, str]) -> bytes:
    """A .tar.gz."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return data.getvalue()


SDIST = archive_of({"tiny-ik-1.0/vendor/tiny/CMakeLists.txt": "# nothing\n"})


def source_of(archive: bytes) -> Source:
    return Source("tiny-ik", "1.0", sha256(archive).hexdigest(), len(archive), "vendor/tiny")


@dataclass
class Machine:
    """A folder with the user's cache, the programs on PATH and a way of compiling."""

    root: Path
    source: Source = field(default_factory=lambda: source_of(SDIST))
    stages: list[tuple[str, float]] = field(default_factory=list)

    def set_up(self) -> dict[str, str]:
        """Make all of it; returns the environment that it wants."""
        self.serve(SDIST)
        self.program("cmake", CMAKE)
        for name in ("cc", "c++", "ninja"):
            self.program(name, "#!/bin/sh\n")
        # Nothing but pip can fetch anything, and no uv lies beside this Python.
        self.program("uv", "#!/bin/sh\nexit 1\n")
        self.program("python", f'#!/bin/sh\nexec "{PYTHON}" "$@"\n')
        self.write("recipe/build.sh", COMPILES)
        self.write("recipe/code.c", CODE)
        (self.root / "model.gguf").touch()
        return {
            "OUTRIDER_CACHE": str(self.root / "cache"),
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "REAL_CC": str(COMPILER),
            "STAGE": str(self.root),
        }

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def program(self, name: str, text: str) -> None:
        self.write(f"bin/{name}", text)
        (self.root / "bin" / name).chmod(0o755)

    def serve(self, archive: bytes) -> None:
        """Let pip bring this archive."""
        (self.root / "sdist.tar.gz").write_bytes(archive)
        self.program("pip3", PIP + DELIVERS)

    @property
    def recipe(self) -> Path:
        return self.root / "recipe"

    @property
    def builds(self) -> Path:
        return self.root / "cache" / "native"

    @property
    def left(self) -> list[str]:
        """What lies in the folder of builds, but for the lock."""
        return sorted(path.name for path in self.builds.iterdir() if path.name != ".lock")

    @property
    def calls(self) -> list[str]:
        file = self.root / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def build(self, *, force: bool = False) -> NativeBuild:
        return build_native(
            self.root / "model.gguf",
            force=force,
            progress=lambda stage, done: self.stages.append((stage, done)),
            source=self.source,
            recipe=self.recipe,
        )


def staged(root: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine in this folder, with this process on it."""
    made = Machine(root)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in made.set_up().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sys.executable", str(root / "bin" / "python"))
    return made


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended, whoever should have asked for its status."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
