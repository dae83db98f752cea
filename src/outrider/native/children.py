"""Programs that work for minutes: their output read line by line into a log, ended with all they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["run_logged"]

_PATIENCE_S = 10.0


def run_logged(
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
