"""Fetching a wheel with the package client that the user has: pip or uv."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Progress", "fetch_wheel"]

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all) a few times per second."""

_POLL_S = 0.2


def fetch_wheel(
    requirement: str, folder: Path, expected_bytes: int, progress: Progress | None = None
) -> str | None:
    """Put the wheel of `requirement`, or what is in it, somewhere below `folder`.

    pip leaves the wheel, uv only knows how to unpack it. Its dependencies are not fetched. The
    clients are tried in turn. Returns None, or why none of them managed.
    """
    commands = list(_commands(requirement, folder / "fetched"))
    if not commands:
        return "there is neither pip nor uv on this machine"
    failures = []
    with _bar(progress) as show:
        for name, command in commands:
            failure = _run(command, folder, lambda size: show(min(size, expected_bytes), expected_bytes))
            if failure is None:
                show(expected_bytes, expected_bytes)
                return None
            failures.append(f"{name} says {failure!r}")
    return "; ".join(failures)


def _commands(requirement: str, target: Path) -> Iterator[tuple[str, list[str]]]:
    """The clients of this machine and what to run, the closest to this interpreter first."""
    download = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--quiet"]
    download += ["--retries", "1", "--disable-pip-version-check", "--dest", str(target), requirement]
    if importlib.util.find_spec("pip"):
        yield "pip", [sys.executable, "-m", "pip", *download]
    uv = _beside_interpreter("uv") or shutil.which("uv")
    if uv:
        install = ["pip", "install", "--no-deps", "--only-binary=:all:", "--no-cache", "--quiet"]
        yield "uv", [uv, *install, "--python", sys.executable, "--target", str(target), requirement]
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        yield pip, [pip, *download]


def _beside_interpreter(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent))


def _run(command: list[str], folder: Path, show: Callable[[int], None]) -> str | None:
    """Run a client to its end; None when it succeeded, else its last words.

    Both clients work in TMPDIR before they deliver, so `folder` grows as the download does.
    """
    log = folder / "client.log"
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("w+b") as output:
        try:
            client = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            return error.strerror or str(error)
        try:
            while _still_runs(client):
                show(_size(folder))
        finally:
            _stop(client)
    if client.returncode == 0:
        return None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {client.returncode}"


def _still_runs(client: subprocess.Popen[bytes]) -> bool:
    try:
        client.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _stop(client: subprocess.Popen[bytes]) -> None:
    """End a client that Ctrl-C or an error has left running."""
    if client.poll() is not None:
        return
    client.terminate()
    try:
        client.wait(5)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()


def _size(folder: Path) -> int:
    """Bytes below `folder`; files that vanish while being counted do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


@contextmanager
def _bar(progress: Progress | None) -> Iterator[Progress]:
    """The caller's own progress, or a bar on standard error, which rich hides off a terminal."""
    if progress is not None:
        yield progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("Fetching the default model", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
