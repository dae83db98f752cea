"""Which CPU this is: its name, and what matters to a library that was compiled for it."""

from __future__ import annotations

import os
import platform
from hashlib import blake2b
from pathlib import Path


def processor_name() -> str:
    """The processor as the system describes it."""
    names = (line.partition(":")[2].strip() for line in _cpuinfo() or () if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def logical_cores() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_id() -> str:
    """Names the CPU's instruction set: a cache folder may be shared between machines."""
    lines = _cpuinfo()
    if lines is None:
        return platform.processor() or platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return blake2b(flags.encode(), digest_size=6).hexdigest()


def _cpuinfo() -> list[str] | None:
    """The lines of /proc/cpuinfo; None where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
