"""What compiling for NVIDIA cards takes: their kinds, and CUDA's compiler, installed or from packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outrider.backends.native.place import ANY_CPU, cuda_libraries, not_fetched
from outrider.core.errors import BuildError, SettingError
from outrider.models.package_clients import install_wheels

_PACKAGES = "cuda13.txt"
_PACKAGED = 13
_MIN_DRIVERS = {12: 525, 13: 580}
"""NVIDIA's drivers that run programs of a major version of CUDA"""
_PACKAGE_BYTES = 525_000_000
_AT_RUN_TIME = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA card that the driver (its major version) shows; `kind` is its compute capability: 86."""

    name: str
    kind: str
    driver: int


@cache
def cards() -> tuple[Card, ...]:
    """The cards of this machine."""
    said = _said("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines()]
    return tuple(
        Card(row[0], row[1].replace(".", ""), int(row[2].partition(".")[0]))
        for row in rows
        if len(row) == 3 and re.fullmatch(r"\d+\.\d", row[1]) and row[2][:1].isdigit()
    )


def cuda_library() -> Path | None:
    """The finished library for this machine's cards; where none was built for them, any; None without one."""
    found = cuda_libraries()
    if len(found) < 2:
        return found[0] if found else None
    here = {card.kind for card in cards()}
    return max(found, key=lambda path: len(here & set(_kinds_of(path))))


def _kinds_of(path: Path) -> list[str]:
    return path.parent.name.rpartition("-sm")[2].split("+")


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """A build for these `kinds` of cards, for this CPU or (`cpu`: any) a usual one, with the compiler of an
    installed toolkit (the folder `root`) or (None) the one that packages bring."""

    kinds: tuple[str, ...]
    cpu: str | None
    root: Path | None

    @property
    def name(self) -> str:
        """The kinds, as names of folders have them."""
        return "+".join(self.kinds)

    def fetch(self, folder: Path, recipe: Path, progress: Callable[[float], None]) -> Path:
        """The toolkit's folder; where it comes from packages, below `folder`. Raises BuildError."""
        return self.root or _fetched(folder, recipe, progress)

    def arguments(self, root: Path) -> list[str]:
        """The options of cmake."""
        return [
            "-DCUDA=ON",
            f"-DCUDA_BESIDE={'OFF' if self.root else 'ON'}",
            f"-DGGML_NATIVE={'OFF' if self.cpu else 'ON'}",
            f"-DCMAKE_CUDA_COMPILER={root / 'bin' / 'nvcc'}",
            f"-DCUDAToolkit_ROOT={root}",
            f"-DCMAKE_CUDA_FLAGS=-L{root / 'lib'}",
            f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{kind}-real' for kind in self.kinds)}",
        ]

    def check(self, root: Path) -> None:
        """Raise SettingError for a kind of card that the compiler does not know."""
        known = re.findall(r"sm_(\d+)", _said(root / "bin" / "nvcc", "--list-gpu-code"))
        if unknown := [kind for kind in self.kinds if known and kind not in known]:
            what, why = f"cards of kind {', '.join(unknown)}", f"this CUDA compiles for {', '.join(known)}"
            raise SettingError(what, why, "Put the nvcc of another CUDA on the PATH, or name another kind.")

    def beside(self, root: Path) -> list[Path]:
        """CUDA's own libraries that the finished one needs beside it."""
        return [] if self.root else [root / "lib" / name for name in _AT_RUN_TIME]


def plan_cuda(asked: str | None) -> CudaPlan:
    """How to compile for the cards of this machine, or for those that are `asked` for: 86, or 86,90. The nvcc
    on the PATH is used where its CUDA is whole and runs under the driver. Raises SettingError."""
    if sys.platform != "linux":
        raise SettingError("--cuda", "it is for Linux", "docs/gpu.md says what there is for other systems.")
    here = cards()
    kinds = [kind.replace(".", "") for kind in re.split(r"[,;\s]+", asked or "") if kind]
    if wrong := [kind for kind in kinds if not re.fullmatch(r"\d{2,3}", kind)]:
        raise SettingError(f"--cuda-arch {asked}", f"{wrong[0]} is no compute capability", "Give 86, or 8.6.")
    if not kinds and not here:
        why = "no NVIDIA card is here (nvidia-smi lists none)"
        raise SettingError("--cuda", why, "Name the kind of card: --cuda-arch 86 (its compute capability).")
    of_here = {card.kind for card in here}
    chosen = tuple(sorted(kinds or of_here))
    root, driver = _installed_toolkit(), min((card.driver for card in here), default=None)
    # Built for cards of another machine, it need not run on this CPU alone.
    cpu = None if of_here & set(chosen) else ANY_CPU
    if root is not None and _runs(_major(root), driver):
        return CudaPlan(chosen, cpu, root)
    if not _runs(_PACKAGED, driver):
        why = f"the driver {driver} is too old for CUDA {_PACKAGED}, which needs {_MIN_DRIVERS[_PACKAGED]}"
        raise SettingError("--cuda", why, "Update the driver, or put an older CUDA's nvcc on the PATH.")
    return CudaPlan(chosen, cpu, None)


def _runs(major: int, driver: int | None) -> bool:
    return driver is None or driver >= _MIN_DRIVERS.get(major, 0 if major < min(_MIN_DRIVERS) else 10**6)


def _installed_toolkit() -> Path | None:
    """The folder of the CUDA whose nvcc is on the PATH; None where there is none, or it lacks cuBLAS."""
    if shutil.which("nvcc") is None:
        return None
    top = re.search(r"^#\$ _?TOP_?=(.*)$", _said("nvcc", "--dryrun", "-x", "cu", "none"), re.M)
    root = Path(top[1].strip()).resolve() if top else None
    return root if root and any(root.glob("**/cublas_v2.h")) and (root / "bin" / "nvcc").is_file() else None


def _major(root: Path) -> int:
    found = re.search(r"release (\d+)\.", _said(root / "bin" / "nvcc", "--version"))
    return int(found[1]) if found else 0


def _fetched(folder: Path, recipe: Path, progress: Callable[[float], None]) -> Path:
    wanted = ["--no-deps", "--require-hashes", "--requirement", str(recipe / _PACKAGES)]
    if failures := install_wheels(wanted, folder, lambda done, total: progress(done / total), _PACKAGE_BYTES):
        raise not_fetched(f"CUDA {_PACKAGED}", failures)
    for compiler in folder.glob("installed/nvidia/*/bin/nvcc"):
        root = compiler.parent.parent
        (root / "lib64").symlink_to("lib")
        for library in (root / "lib").glob("lib*.so.*"):
            library.with_name(library.name.partition(".so.")[0] + ".so").symlink_to(library.name)
        return root
    raise BuildError(f"CUDA {_PACKAGED}", "there is no nvcc in its packages", "Install CUDA's toolkit.")


def _said(program: str | Path, *arguments: str) -> str:
    command: Sequence[str | Path] = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
