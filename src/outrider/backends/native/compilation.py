"""One compilation: the programs that it runs, how far they are, and what they say when they fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from outrider.backends.native.tools import (
    LIBRARY,
    Source,
    Tools,
    builds_dir,
    disk_full,
    fetched,
    find_tools,
    is_full,
    logical_cores,
)
from outrider.core.errors import BuildError

Progress = Callable[[str, float], None]
"""Called with the stage ("fetching", "tools", "compiling", "trying") and how much of it is done, 0 to 1."""

_TARGET = "outrider-ik"
_BYTES_A_COMPILER = 2_000_000_000
_TRIAL_LIMIT_S = 300
_PATIENCE_S = 10.0
"""for a program that was asked to end"""
_TRIAL = (
    "import ctypes, os, sys; "
    "sys.exit(ctypes.CDLL(sys.argv[1]).outrider_first_decode(os.fsencode(sys.argv[2])) != 0)"
)
_DONE = re.compile(r"\[\s*(?:(\d+)/(\d+)|(\d+)%)\]")
"""How far ninja ("[3/40]") and make ("[  7%]") are."""

_ERROR = re.compile(r"error: |CMake Error")


def kept_log() -> Path:
    """Where the log of the last build that failed is."""
    return builds_dir() / "build.log"


class Compilation:
    """The library of `source`, made in the folder `work` as `recipe` says.

    What the programs say goes into a log, which is kept where they fail.
    """

    def __init__(self, source: Source, recipe: Path, work: Path, progress: Progress) -> None:
        self._source = source
        self._recipe = recipe
        self._work = work
        self._progress = progress
        self._log = work / "build.log"

    def library(self) -> tuple[Path, float]:
        """The library, and the seconds that compiling it took. Raises BuildError."""
        code = fetched(self._source, self._folder("source"), lambda done: self._progress("fetching", done))
        environment = _environment(self._folder("tmp"))
        tools = find_tools(self._folder("tools"), environment, lambda: self._progress("tools", 0.0))
        build = self._folder("build")
        start = monotonic()
        self._progress("compiling", 0.0)
        self._run(tools, f"-S{self._recipe}", f"-B{build}", f"-G{tools.generator}", f"-DSOURCE={code}")
        self._run(tools, "--build", str(build), "--target", _TARGET, "--parallel", str(_compilers()))
        library = build / LIBRARY
        if not library.is_file():
            raise self._failure(f"its build ended without {LIBRARY}")
        return library, monotonic() - start

    def _folder(self, name: str) -> Path:
        folder = self._work / name
        folder.mkdir()
        return folder

    def _run(self, tools: Tools, *arguments: str) -> None:
        if _run_logged([tools.cmake, *arguments], self._log, tools.environment, self._show) != 0:
            raise self._failure("it cannot be compiled here")

    def _show(self, line: str) -> None:
        if match := _DONE.match(line):
            done, of, percent = match.groups()
            self._progress("compiling", int(percent) / 100 if percent else int(done) / int(of))

    def check_first_decode(self, library: Path, model: Path) -> None:
        """Raise BuildError where the library does not decode with the model, or dies of it."""
        self._progress("trying", 0.0)
        command = [sys.executable, "-I", "-c", _TRIAL, str(library), str(model)]
        try:
            trial = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TRIAL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._failure(f"its first decode did not end within {_TRIAL_LIMIT_S} s") from None
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n{trial.stdout}{trial.stderr}exit status {trial.returncode}\n")
        if trial.returncode < 0:
            raise self._failure(f"it dies at its first decode (signal {-trial.returncode})")
        if trial.returncode != 0:
            raise self._failure("it cannot decode")

    def _failure(self, why: str) -> BuildError:
        """The error, with the line of the log that says most, and where the whole of it is."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        if is_full(log):
            return disk_full()
        with suppress(OSError):
            shutil.copyfile(self._log, kept_log())
        said = _telling_line(log.replace(f"{self._work}{os.sep}", "").splitlines())
        reason = f"{why} ({said})" if said else why
        way_out = f"The whole log is {kept_log()}. Outrider runs without this build too."
        return BuildError(f"{self._source.name} {self._source.version}", reason, way_out)


def _environment(temporary: Path) -> dict[str, str]:
    """What the programs of a build see: the user's own flags, and not those of a make that this runs under.

    Compilers leave files in TMPDIR when they are killed.
    """
    kept = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    return {**kept, "TMPDIR": str(temporary), "LC_ALL": "C", "NINJA_STATUS": "[%f/%t] "}


def _telling_line(lines: list[str]) -> str:
    """The first line that names an error, else the last one. CMake says what it is in the next line."""
    found = next((number for number, line in enumerate(lines) if _ERROR.search(line)), None)
    if found is None:
        return lines[-1].strip() if lines else ""
    after = [line.strip() for line in lines[found + 1 :] if line.strip()]
    parts = [lines[found].strip(), *(after[:1] if "CMake Error" in lines[found] else [])]
    return " ".join(parts)


def _compilers() -> int:
    """How many compilers to run at once: one a core, as far as the memory goes."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(logical_cores(), memory_bytes // _BYTES_A_COMPILER))


def _run_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str], on_line: Callable[[str], None]
) -> int:
    """Run a program, and return its exit status. Each line of its output is added to `log` and shown to
    `on_line`. Where that or Ctrl-C ends the wait, the program is ended too, with all that it started."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        # A group of its own: a compiler must not go on when its build is over.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(environment),
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                file.write(line)
                on_line(line.rstrip())
            return child.wait()
        finally:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """End a program that still runs, and wait until it has: ninja passes SIGTERM on to its compilers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_PATIENCE_S)
    if child.stdout is not None:
        child.stdout.close()
