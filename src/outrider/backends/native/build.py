"""A library compiled on this machine, in the user's cache: fetched, built, tried, and only then put in its
place. A C++ compiler must be there; the source, cmake and ninja, and CUDA's compiler are fetched by the
user's package client."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from outrider.backends.machine import total_bytes
from outrider.backends.native.cuda import CudaPlan
from outrider.backends.native.place import (
    IK,
    RECIPE,
    Source,
    builds_dir,
    disk_full,
    is_full,
    library_path,
    not_fetched,
)
from outrider.core.errors import BuildError, SettingError
from outrider.core.files import check_room, reason_of
from outrider.models.package_clients import fetch_source, install_wheels

Progress = Callable[[str, float], None]
"""Called with the stage ("fetching", "CUDA", "tools", "compiling", "trying") and how much of it is done, 0 to
1."""

_WORK = ".build"
"""the folder of a build; the same for each, since ccache knows what it compiled by its path"""
_NEEDED_BYTES = 500_000_000
_CUDA_BYTES = 3_500_000_000
_BYTES_A_COMPILER = 2_000_000_000
_TRIAL_LIMIT_S = 300
_PATIENCE_S = 10.0
"""for a program that was asked to end"""
_TRIAL = (
    f"import ctypes, os, signal, sys; signal.alarm({_TRIAL_LIMIT_S}); "
    "sys.exit(ctypes.CDLL(sys.argv[1]).outrider_first_decode(os.fsencode(sys.argv[2])) != 0)"
)
_DONE = re.compile(r"\[\s*(\d+)/(\d+)\]")
"""How far ninja is: [3/40]."""
_ERROR = re.compile(r"error: |CMake Error")
_CMAKE_NEEDED = (3, 19)
_COMPILERS = {"CC": ("cc", "gcc", "clang"), "CXX": ("c++", "g++", "clang++")}


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
    cuda: CudaPlan | None = None,
) -> NativeBuild:
    """The library of `source` for this CPU, and `cuda` cards, built unless it is there already or with
    `force`. `model` is what it must decode with before it counts as finished; the call is made in a child
    process. Whatever ends the build, Ctrl-C and a full disk among it, leaves what was there before. Raises
    BuildError, and SettingError where the cache cannot be written."""
    place = library_path(source, recipe, cpu=cuda.cpu if cuda else None, cards=cuda.name if cuda else "")
    if place.is_file() and not force:
        return NativeBuild(place, built=False)
    check_compilers(source.name)
    try:
        with _work_folder(source, _CUDA_BYTES if cuda else _NEEDED_BYTES) as work:
            finished, seconds = _compile(source, recipe, cuda, work, progress)
            progress("trying", 0.0)
            _check_first_decode(source, work, finished / source.library, model)
            if place.parent.exists():
                place.parent.rename(work / "before")
            finished.rename(place.parent)
            (builds_dir() / "build.log").unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full() from error
        reason = f"the library cannot be built there ({reason_of(error)})"
        way_out = "Check its permissions, or set OUTRIDER_CACHE to another folder."
        raise SettingError(str(builds_dir()), reason, way_out) from error
    return NativeBuild(place, built=True, seconds=seconds)


@contextmanager
def _work_folder(source: Source, needed_bytes: int) -> Iterator[Path]:
    """A folder on the cache's own disk, gone at the end; so are those of builds that were killed. One build
    at a time: two would take turns at the memory, and the second finds nothing left to do."""
    builds = builds_dir()
    builds.mkdir(parents=True, exist_ok=True)
    with (builds / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildError(source.name, "another process is building it", "Wait for it.") from error
        for left in builds.glob(f"{_WORK}*"):
            shutil.rmtree(left, ignore_errors=True)
        way_out = disk_full().way_out
        check_room(builds, needed_bytes, lambda why: BuildError(source.name, why, way_out))
        work = builds / _WORK
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _compile(
    source: Source, recipe: Path, cuda: CudaPlan | None, work: Path, progress: Progress
) -> tuple[Path, float]:
    """A folder with the library and what it needs beside it, made in the folder `work` as `recipe` says, and
    the seconds that compiling it took."""
    for name in ("source", "cuda", "tmp", "tools", "build", "finished"):
        (work / name).mkdir()
    code = fetched(source, work / "source", lambda done: progress("fetching", done))
    given, beside = list[str](), list[Path]()
    if cuda:
        root = cuda.fetch(work / "cuda", recipe, lambda done: progress("CUDA", done))
        cuda.check(root)
        given, beside = cuda.arguments(root), cuda.beside(root)
    # The user's own flags, and not those of a make that this runs under. Compilers leave files in TMPDIR when
    # they are killed.
    kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    own = {"TMPDIR": str(work / "tmp"), "LC_ALL": "C", "NINJA_STATUS": "[%f/%t] "}
    environment = with_tools(work / "tools", kept | own, lambda: progress("tools", 0.0))

    def show(line: str) -> None:
        if match := _DONE.match(line):
            progress("compiling", int(match[1]) / int(match[2]))

    start, build, library = monotonic(), f"{work / 'build'}", work / "build" / source.library
    progress("compiling", 0.0)
    # As many compilers as cores, as far as the memory goes.
    number = max(1, min(os.cpu_count() or 1, int(min(total_bytes(), 1e15) // _BYTES_A_COMPILER)))
    configure = [f"-S{recipe}", f"-B{build}", f"-DSOURCE={code}", f"-DNAME={source.target}", *given]
    for arguments in (configure, ["--build", build, "--target", source.target, "--parallel", str(number)]):
        if _run_logged(["cmake", *arguments], work, environment, show) != 0:
            raise _failure(source, work, "it cannot be compiled here")
    if not library.is_file():
        raise _failure(source, work, f"its build ended without {library.name}")
    for file in (library, *beside):
        file.rename(work / "finished" / file.name)
    return work / "finished", monotonic() - start


def _check_first_decode(source: Source, work: Path, library: Path, model: Path) -> None:
    command = [sys.executable, "-I", "-c", _TRIAL, str(library), str(model)]
    status = _run_logged(command, work, os.environ, lambda _line: None)
    if status == 0:
        return
    with (work / "build.log").open("a", encoding="utf-8") as log:
        log.write(f"exit status {status}\n")
    why = f"it dies at its first decode (signal {-status})" if status < 0 else "it cannot decode"
    if status == -signal.SIGALRM:
        why = f"its first decode did not end within {_TRIAL_LIMIT_S} s"
    raise _failure(source, work, why)


def _failure(source: Source, work: Path, why: str) -> BuildError:
    log, kept = (work / "build.log").read_text(encoding="utf-8", errors="replace"), builds_dir() / "build.log"
    if is_full(log):
        return disk_full()
    with suppress(OSError):
        shutil.copyfile(work / "build.log", kept)
    lines = [line.strip() for line in log.replace(f"{work}{os.sep}", "").splitlines() if line.strip()]
    # The first that names an error, else the last. CMake says what it is in the next line.
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    said = " ".join(lines[first : first + 1 + ("CMake Error" in lines[first])])
    way_out = f"The whole log is {kept}. Outrider runs without this build too."
    return BuildError(f"{source.name} {source.version}", f"{why} ({said})", way_out)


def _run_logged(
    command: Sequence[str], work: Path, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> int:
    """Run a program, and return its exit status. Each line of its output is added to the log in `work` and
    shown to `on_line`. Where that or Ctrl-C ends the wait, the program is ended, with all that it started."""
    with (
        (work / "build.log").open("a", encoding="utf-8") as file,
        # A group of its own: a compiler must not go on when its build is over.
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        file.write(f"$ {' '.join(command)}\n")
        try:
            for line in child.stdout or ():
                file.write(line)
                on_line(line.rstrip())
            return child.wait()
        finally:  # ninja passes SIGTERM on to its compilers
            for number in (signal.SIGTERM, signal.SIGKILL):
                if child.poll() is None:
                    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(child.pid, number)
                        child.wait(_PATIENCE_S)


# What a build needs


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
    """The environment, in which cmake runs with ninja: those of this machine; else wheels that are installed
    below `folder`, which lasts as long as the build (`on_fetch` is called before). Raises BuildError."""
    found = dict(environment)
    missing = [] if _is_cmake_usable(found) else [f"cmake>={'.'.join(map(str, _CMAKE_NEEDED))}"]
    missing += [] if shutil.which("ninja", path=found.get("PATH", os.defpath)) else ["ninja"]
    if missing:
        on_fetch()
        if failures := install_wheels(missing, folder, lambda _done, _total: None):
            raise not_fetched(" and ".join(name.partition(">")[0] for name in missing), failures)
        # The wheels' programs are partly Python scripts.
        installed, python_path = folder / "installed", found.get("PYTHONPATH")
        found["PATH"] = os.pathsep.join([str(installed / "bin"), found.get("PATH", os.defpath)])
        found["PYTHONPATH"] = os.pathsep.join([str(installed), *([python_path] if python_path else [])])
    return found | {"CMAKE_GENERATOR": "Ninja"}


def _is_cmake_usable(environment: Mapping[str, str]) -> bool:
    asking = ["cmake", "--version"]
    try:
        said = subprocess.run(asking, env=environment, capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    version = re.search(r"version (\d+)\.(\d+)", said)
    return version is not None and (int(version[1]), int(version[2])) >= _CMAKE_NEEDED


def fetched(source: Source, folder: Path, progress: Callable[[float], None]) -> Path:
    """The folder of the source that is compiled, somewhere below `folder`. `progress` is called with the part
    of it that is there, from 0 to 1. Raises BuildError."""
    pinned, way_out = f"{source.name}=={source.version}", "Try again, or check the package index in use."
    expected = source.sha256, folder, source.archive_bytes
    if failures := fetch_source(pinned, *expected, lambda done, total: progress(done / total)):
        raise not_fetched(pinned, failures)
    for archive in folder.rglob("*.tar.gz"):
        try:
            with tarfile.open(archive) as opened:
                # The first releases of Python 3.11 have no filters.
                opened.extraction_filter = getattr(tarfile, "data_filter", None)
                opened.extractall(folder / "unpacked")
        except tarfile.TarError as error:
            raise BuildError(pinned, f"its source cannot be unpacked ({error})", way_out) from error
    for found in folder.rglob(f"{source.folder}/CMakeLists.txt"):
        return found.parent
    raise BuildError(pinned, f"there is no {source.folder} in its source", way_out)
