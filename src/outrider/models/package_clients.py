"""Fetching packages with the package client that the user has, pip or uv: it honours their index."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) a few times per second."""

_POLL_S = 0.2
_WHEELS = "--only-binary=:all:"
_PIP = ("--no-input", "--no-cache-dir", "--quiet")
_PIP_DOWNLOAD = ("download", "--no-deps", *_PIP, "--retries", "1", "--disable-pip-version-check")
_REASONS = ("ERROR: ", "error: ", "cause: ", "╰─▶ ")
"""How the lines begin in which pip and uv say what is wrong; others may follow them. Where pip itself breaks,
the last line of its traceback does."""


def fetch_source(
    requirement: str, sha256: str, folder: Path, expected_bytes: int, progress: Progress | None = None
) -> str | None:
    """Put the source distribution of `requirement` (`name==version`) somewhere below `folder`. pip leaves the
    archive. uv leaves what is in it, having checked the hash, which pip checks too. Nothing is built, though
    pip asks the package's build backend for its name. Returns None, or why no client managed."""
    name, pinned, pin = requirement.partition("==")[0], folder / "pinned.txt", f"--hash=sha256:{sha256}"
    pinned.write_text(f"{requirement} {pin}\n", encoding="utf-8")
    source = ["--no-binary", name, "--dest", str(folder / "fetched"), "--requirement", str(pinned)]
    uv = _uv_source(name, pin, pinned, folder)
    return _fetch([*_PIP_DOWNLOAD, *source], uv, folder, expected_bytes, progress)


def install_wheels(
    requirements: Iterable[str], folder: Path, progress: Progress | None, expected_bytes: int = 0
) -> str | None:
    """Install wheels, and what they depend on unless `--no-deps` is among them, into `folder / "installed"`,
    with its programs in `bin`. Returns None, or why no client managed."""
    install = ["--target", str(folder / "installed"), *requirements]
    return _fetch(
        ["install", _WHEELS, *_PIP, *install], [_uv_install(*install)], folder, expected_bytes, progress
    )


def _uv_install(*arguments: str) -> list[str]:
    return ["pip", "install", _WHEELS, "--no-cache", "--quiet", "--python", sys.executable, *arguments]


def _uv_source(name: str, pin: str, pinned: Path, folder: Path) -> Iterator[list[str]]:
    """The way round that uv needs, which downloads no source on request: it can say where one is, and
    asked what installing that would do, fetches it into its cache and checks it without building it."""
    lock, located = folder / "pylock.toml", folder / "located.txt"
    common = ["--no-deps", "--python", sys.executable, "--cache-dir", str(folder / "fetched"), "--quiet"]
    where = ["--format", "pylock.toml", "--generate-hashes", "--no-header", "--output-file", str(lock)]
    yield ["pip", "compile", *common, *where, str(pinned)]
    source = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"][0]["sdist"]
    place = source["url"] if "url" in source else (folder / source["path"]).resolve().as_uri()
    located.write_text(f"{name} @ {place} {pin}\n", encoding="utf-8")
    check = ["--dry-run", "--no-binary=:all:", "--require-hashes", "--requirement", str(located)]
    yield ["pip", "install", *common, *check]


def _fetch(
    pip: list[str], uv: Iterable[list[str]], folder: Path, expected_bytes: int, progress: Progress | None
) -> str | None:
    """Let the clients here try in turn; `uv` are its commands, each made when those before have succeeded."""
    clients: list[tuple[str, list[str], Iterable[list[str]]]] = []
    if importlib.util.find_spec("pip"):
        clients.append(("pip", [sys.executable, "-m", "pip"], [pip]))
    if found := shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv"):
        clients.append(("uv", [found], uv))
    if found := shutil.which("pip3") or shutil.which("pip"):
        clients.append((found, [found], [pip]))
    failures = []
    with _bar(progress) as show:
        for name, client, commands in clients:
            try:
                for arguments in commands:
                    _run(
                        [*client, *arguments],
                        folder,
                        lambda size: show(min(size, expected_bytes), expected_bytes),
                    )
            except (_Failure, KeyError, IndexError, TypeError, ValueError, OSError) as error:
                said = str(error) if isinstance(error, _Failure) else f"nothing that can be used ({error!r})"
                failures.append(f"{name} says {said!r}")
            else:
                show(expected_bytes, expected_bytes)
                return None
    return "; ".join(failures) or "there is neither pip nor uv on this machine"


class _Failure(Exception):
    """A client did not manage; the message is its last words."""


def _run(command: list[str], folder: Path, show: Callable[[int], None]) -> None:
    """Run a client, which works in TMPDIR: `folder` grows as the download does. Raises _Failure."""
    log = folder / "client.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        try:
            client = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise _Failure(error.strerror or str(error)) from error
        try:
            while client.poll() is None:
                show(_size(folder))
                with suppress(subprocess.TimeoutExpired):
                    client.wait(_POLL_S)
        finally:  # Ctrl-C or an error has left it running
            client.kill()
            client.wait()
    if client.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith(_REASONS) and line != "ERROR: Exception:"]
        raise _Failure((reasons or lines or [f"exit status {client.returncode}"])[-1])


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@contextmanager
def _bar(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    with Bars(console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("Fetching the default model", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
