"""What computes here: processor, devices and the builds of the libraries in use."""

from __future__ import annotations

import platform
from pathlib import Path

from outrider.backends.gguf.libraries import installed, opened

__all__ = ["build_id", "device_names", "processor_name"]


def build_id() -> str:
    """Names the builds of the libraries that this process has opened, or else of those that it could."""
    ids = [library.build_id for library in opened()] or [str(file) for file in installed()]
    return "; ".join(ids) or "no library"


def device_names() -> tuple[str, ...]:
    """The processor, and what else the opened libraries can compute on, as they describe it."""
    names = [processor_name()]
    for library in opened():
        names += [name for name in library.device_names if name not in names]
    return tuple(names)


def processor_name() -> str:
    """The processor as the system describes it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
