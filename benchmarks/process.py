"""A server as a process on a free loopback port: started, awaited, watched, ended."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

START_PATIENCE_S = 300
END_PATIENCE_S = 30


class Server:
    """A running server; a context manager that ends it, whatever it is doing.

    `command` is a shell-like line in which `{port}` and the names of `values` are filled in. It counts
    as started when `/health` answers 200. Raises RuntimeError with the end of its log when it does not.
    """

    def __init__(self, name: str, command: str, values: Mapping[str, object]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self.address = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            fill(command, {**values, "port": port}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while self.is_alive and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not start:\n{self.end_of_log()}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end_of_log(self, lines: int = 20) -> str:
        self._log.seek(0)
        return b"\n".join(self._log.read().splitlines()[-lines:]).decode(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer; status 0 where there is none."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=20) as response:
                return response.status, response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def cpu_s(self) -> float:
        """Processor time used so far, by all its threads and by children that have ended."""
        times = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Memory in use by the process and its children."""
        return sum(map(_rss_bytes, _family(self._process.pid)))

    def close(self) -> None:
        """End the process; ending it twice is harmless."""
        self._process.terminate()
        try:
            self._process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fill(command: str, values: Mapping[str, object]) -> list[str]:
    """The arguments of a command, values filled in; one that holds blanks stays one argument."""
    return [argument.format(**values) for argument in shlex.split(command)]


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return
    for child in " ".join(lists).split():
        yield from _family(int(child))


def _rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
