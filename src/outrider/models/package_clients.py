"""Fetching packages with the package client that the user has, pip or uv: it honours their index."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) a few times per second."""

_POLL_S = 0.2
_REASONS = ("ERROR: ", "error: ", "cause: ", "╰─▶ ")
"""How the lines begin in which pip and uv say what is wrong; others may follow them. Where pip itself breaks,
the last line of its traceback does."""


_Client = tuple[str, Iterable[list[str]]]
"""A client's name, and the commands that it takes, each made when those before it have succeeded."""


def fetch_wheel(
    requirement: str, folder: Path, expected_bytes: int, progress: Progress | None = None
) -> str | None:
    """Put the wheel of `requirement`, or what is in it, somewhere below `folder`.

    pip leaves the wheel, uv only knows how to unpack it. Its dependencies are not fetched. The
    clients are tried in turn. Returns None, or why none of them managed.
    """
    target = str(folder / "fetched")
    download = ["--only-binary=:all:", "--dest", target, requirement]
    install = ["--no-deps", "--target", target, requirement]
    clients = _clients(lambda pip: [_download(pip, *download)], lambda uv: [_install(uv, *install)])
    return _fetch(clients, folder, expected_bytes, progress)


def fetch_source(
    requirement: str, sha256: str, folder: Path, expected_bytes: int, progress: Progress | None = None
) -> str | None:
    """Put the source distribution of `requirement` (`name==version`) somewhere below `folder`.

    pip leaves the archive. uv leaves what is in it, having checked the hash, which pip checks too.
    Nothing is built, though pip asks the package's build backend for its name. Returns None, or
    why no client managed.
    """
    pinned = folder / "pinned.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    name = requirement.partition("==")[0]
    download = ["--no-binary", name, "--dest", str(folder / "fetched"), "--requirement", str(pinned)]
    clients = _clients(lambda pip: [_download(pip, *download)], lambda uv: _uv_source(uv, pinned, folder))
    return _fetch(clients, folder, expected_bytes, progress)


def install_wheels(requirements: Iterable[str], folder: Path, progress: Progress) -> str | None:
    """Install wheels and what they depend on into `folder / "installed"`, with its programs in `bin`.

    Returns None, or why no client managed.
    """
    install = ["--target", str(folder / "installed"), *requirements]
    quiet = ["install", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--quiet"]
    clients = _clients(lambda pip: [[*pip, *quiet, *install]], lambda uv: [_install(uv, *install)])
    return _fetch(clients, folder, 0, progress)


def _fetch(
    clients: Iterable[_Client], folder: Path, expected_bytes: int, progress: Progress | None
) -> str | None:
    """Let the clients try in turn; None when one of them managed."""
    failures = []
    with _bar(progress) as show:
        for name, commands in clients:
            failure = _first_failure(
                commands, folder, lambda size: show(min(size, expected_bytes), expected_bytes)
            )
            if failure is None:
                show(expected_bytes, expected_bytes)
                return None
            failures.append(f"{name} says {failure!r}")
    return "; ".join(failures) or "there is neither pip nor uv on this machine"


def _clients(
    with_pip: Callable[[list[str]], Iterable[list[str]]], with_uv: Callable[[str], Iterable[list[str]]]
) -> Iterator[_Client]:
    """The clients of this machine, the closest to this interpreter first."""
    if importlib.util.find_spec("pip"):
        yield "pip", with_pip([sys.executable, "-m", "pip"])
    uv = _beside_interpreter("uv") or shutil.which("uv")
    if uv:
        yield "uv", with_uv(uv)
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        yield pip, with_pip([pip])


def _download(pip: list[str], *arguments: str) -> list[str]:
    options = ["--no-deps", "--no-input", "--no-cache-dir", "--quiet", "--retries", "1"]
    return [*pip, "download", *options, "--disable-pip-version-check", *arguments]


def _install(uv: str, *arguments: str) -> list[str]:
    options = ["--only-binary=:all:", "--no-cache", "--quiet", "--python", sys.executable]
    return [uv, "pip", "install", *options, *arguments]


def _uv_source(uv: str, pinned: Path, folder: Path) -> Iterator[list[str]]:
    """The way round that uv needs, which downloads no source on request: it can say where one is, and
    asked what installing that would do, fetches it into its cache and checks it without building it."""
    lock, located = folder / "pylock.toml", folder / "located.txt"
    common = ["--no-deps", "--python", sys.executable, "--cache-dir", str(folder / "fetched"), "--quiet"]
    where = ["--format", "pylock.toml", "--generate-hashes", "--no-header", "--output-file", str(lock)]
    yield [uv, "pip", "compile", *common, *where, str(pinned)]
    source = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"][0]["sdist"]
    place = source["url"] if "url" in source else (folder / source["path"]).resolve().as_uri()
    requirement, pin = pinned.read_text(encoding="utf-8").split(" ", 1)
    located.write_text(f"{requirement.partition('==')[0]} @ {place} {pin}", encoding="utf-8")
    yield [
        uv,
        "pip",
        "install",
        *common,
        "--dry-run",
        "--no-binary=:all:",
        "--require-hashes",
        "-r",
        str(located),
    ]


def _beside_interpreter(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent))


def _first_failure(commands: Iterable[list[str]], folder: Path, show: Callable[[int], None]) -> str | None:
    """Run a client's commands to the first that fails; None when none does."""
    try:
        return next((failure for one in commands if (failure := _run(one, folder, show)) is not None), None)
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        return f"nothing that can be used ({error!r})"


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
    reasons = [line for line in lines if line.startswith(_REASONS) and line != "ERROR: Exception:"]
    return (reasons or lines or [f"exit status {client.returncode}"])[-1]


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
