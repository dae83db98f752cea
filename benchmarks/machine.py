"""What a result was measured on: the record that stands at the head of every results file."""

from __future__ import annotations

import fcntl
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.backends.gguf import build_id
from outrider.backends.gguf.options import physical_cores
from outrider.certify.certificate import model_files
from outrider.lab.machine import machine


def describe(*models: Path) -> dict[str, Any]:
    """Machine, library build, commit and model hashes, as plain data."""
    return {
        "kind": "machine",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": machine()["cpu"],
        "physical_cores": physical_cores(),
        "python": platform.python_version(),
        "outrider": __version__,
        "commit": _commit(),
        "llama_cpp": build_id(),
        "models": {file["name"]: file["sha256"] for model in models for file in model_files(model)},
    }


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold `lock` meanwhile, as flock(1) does: other work can take turns with a measurement."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.3)  # flock is not fair: whoever waits comes first
