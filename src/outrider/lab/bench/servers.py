"""A server as a process on a free loopback port: started, awaited, ended."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import httpx

from outrider.core.errors import OutriderError, SettingError

START_PATIENCE_S = 300.0
END_PATIENCE_S = 30.0

_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("whoever started this has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server, and has Linux end it when its parent is killed before it could."""


class ContestantError(OutriderError):
    """Another engine does not start, refuses, or breaks off."""


class RefusedError(ContestantError):
    """Another engine cannot be asked this, or refuses this one request: others it may answer."""


class Server:
    """A running server; a context manager that ends it, whatever it is doing, with all that it started.

    `command` is a shell-like line in which `{port}` and the names of `values` are filled in. It counts
    as started when `/health` answers 200. Raises ContestantError with the end of its log when it does not
    within `patience_s`, SettingError for a command that cannot be one.
    """

    def __init__(
        self, name: str, command: str, values: Mapping[str, object], *, patience_s: float = START_PATIENCE_S
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name = name
        self.address = f"http://127.0.0.1:{port}"
        words = words_of(name, command, {**values, "port": port})
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self._process = subprocess.Popen(
            _tied(words),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to answer, and its group can be ended as a whole
        )
        try:
            self._wait(patience_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while self.is_alive and time.monotonic() < deadline:
            if self.get("/health", patience_s=2)[0] == 200:
                return
            time.sleep(0.2)
        ended = self._process.poll()
        why = (
            f"it does not start within {patience_s:g} s"
            if ended is None
            else f"it does not start: it ended with code {ended}"
        )
        raise ContestantError(self.name, why, f"The end of its log:\n{self.end_of_log()}")

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def end_of_log(self) -> str:
        """The last lines that it wrote, on either stream."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 10_000, 0))
        return b"\n".join(self._log.read().splitlines()[-20:]).decode(errors="replace")

    def get(self, path: str, *, patience_s: float = 20) -> tuple[int, str]:
        """Status and text of an answer; status 0 where there is none."""
        try:  # the loopback has no proxy
            response = httpx.get(self.address + path, timeout=patience_s, trust_env=False)
        except httpx.HTTPError as error:
            return 0, str(error)
        return response.status_code, response.text

    @property
    def pid(self) -> int:
        """That of its process, the first of what it started."""
        return self._process.pid

    def close(self) -> None:
        """End the process and what it started; ending it twice is harmless."""
        if self._log.closed:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # an interrupt while waiting, or children that outlived it
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._log.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; macOS says so of zombies
            os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def words_of(name: str, command: str, values: Mapping[str, object]) -> list[str]:
    """The filled-in words of a command whose program is there. Raises ContestantError where it is not, and
    as `fill` does."""
    words = fill(command, values)
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else command
        raise ContestantError(name, f"there is no program {program!r}", "Give its path, or install it.")
    return words


def fill(command: str, values: Mapping[str, object]) -> list[str]:
    """The arguments of a command, values filled in; one that holds blanks stays one argument.

    Raises SettingError for a place that has no value, or a quote that is not closed.
    """
    try:
        return [argument.format(**values) for argument in shlex.split(command)]
    except (KeyError, IndexError) as error:
        known = ", ".join(f"{{{name}}}" for name in values)
        why = f"nothing is known to fill in for {{{error.args[0]}}}"
        raise SettingError(command, why, f"Use {known}; write {{{{ and }}}} for braces.") from error
    except ValueError as error:
        raise SettingError(command, f"it is no command ({error})", "Close its quotes and braces.") from error


def _tied(words: list[str]) -> list[str]:
    """A command line that ends with us, where the system can do that."""
    if sys.platform != "linux":
        return words
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *words]
