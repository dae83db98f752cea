"""What a result was measured on: the record that stands at the head of every results file."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider import __version__
from outrider.backends.llama_cpp import build_id
from outrider.backends.llama_cpp.options import physical_cores


def describe(*models: Path) -> dict[str, Any]:
    """Machine, library build, commit and model hashes, as plain data."""
    return {
        "kind": "machine",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "physical_cores": physical_cores(),
        "python": platform.python_version(),
        "outrider": __version__,
        "commit": _commit(),
        "llama_cpp": build_id(),
        "models": {model.name: sha256(model) for model in models},
    }


def sha256(path: Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{name} ({', '.join(kinds)})"


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
