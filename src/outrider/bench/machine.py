"""What a sweep is measured on: the head of its rows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.backends.gguf import device_names, physical_cores
from outrider.bench.plan import SweepPlan
from outrider.lab.machine import machine, versions
from outrider.lab.prompts import Workload
from outrider.lab.rows import HeadRow


def head_row(plan: SweepPlan, workloads: Sequence[Workload]) -> HeadRow:
    """Machine, library build, plan, and which prompts its workloads held."""
    facts: dict[str, Any] = {
        **machine(),
        "physical_cores": physical_cores(),
        "devices": list(device_names()),
        "memory_bytes": _memory_bytes(),
        **versions(version("outrider")),
        "commit": _commit(),
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = {workload.name: _digest(workload) for workload in workloads}
    return HeadRow(started=started, machine=facts, plan=plan.model_dump(mode="json"), prompts=prompts)


def _digest(workload: Workload) -> str:
    return blake2b(repr(workload.prompts).encode(errors="backslashreplace"), digest_size=12).hexdigest()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


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
