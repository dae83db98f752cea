"""Which CPU this is, as far as a library that was compiled for it is concerned."""

from __future__ import annotations

import platform
from hashlib import blake2b
from pathlib import Path

__all__ = ["cpu_id"]


def cpu_id() -> str:
    """Names the CPU's instruction set: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return blake2b(flags.encode(), digest_size=6).hexdigest()
