"""What an experiment ran on: the versions and the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.gguf.libraries import build_id
from outrider.backends.machine import processor_name


def versions(outrider: str) -> dict[str, str]:
    """Versions of everything that computes."""
    return {
        "outrider": outrider,
        "llama_cpp": build_id(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """Processor, logical cores and operating system."""
    return {
        "cpu": _cpu(),
        "logical_cores": os.cpu_count() or 0,
        "os": platform.platform(terse=True),
        "architecture": platform.machine(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    kinds = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{processor_name()} ({', '.join(kinds)})" if kinds else processor_name()
