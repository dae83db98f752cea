"""What a sweep is measured on: the head of its rows."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any

from outrider.backends.gguf import device_names, physical_cores
from outrider.backends.machine import total_bytes
from outrider.bench.plan import SweepPlan
from outrider.lab.machine import machine, versions
from outrider.lab.prompts import Workload
from outrider.lab.rows import HeadRow


def head_row(plan: SweepPlan, workloads: Sequence[Workload]) -> HeadRow:
    """Machine, library build, plan, and which prompts its workloads held."""
    memory_bytes = total_bytes()
    facts: dict[str, Any] = {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": int(memory_bytes) if isfinite(memory_bytes) else None,
        **versions(version("outrider")),
        "commit": _commit(),
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = {workload.name: _digest(workload) for workload in workloads}
    return HeadRow(started=started, machine=facts, plan=plan.model_dump(mode="json"), prompts=prompts)


def _digest(workload: Workload) -> str:
    return blake2b(repr(workload.prompts).encode(errors="backslashreplace"), digest_size=12).hexdigest()


def _commit() -> str | None:
    """The commit of a checkout that this runs from; None for an installed package."""
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
