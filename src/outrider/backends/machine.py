"""What this machine has: its processor, the cores and the memory that this process may use."""

from __future__ import annotations

import os
import platform
from functools import cache
from hashlib import blake2b
from pathlib import Path


def processor_name() -> str:
    """The processor as the system describes it."""
    names = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def cpu_id() -> str:
    """Names the CPU's instruction set: a cache folder may be shared between machines."""
    lines = _cpuinfo()
    if not lines:
        return platform.processor() or platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return blake2b(flags.encode(), digest_size=6).hexdigest()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


@cache
def physical_cores() -> int:
    """Physical cores that this process may use: hyper-threads only slow matrix products."""
    return max(1, min(num_cores(), _cpu_quota()))


def num_cores() -> int:
    """Physical cores that it may run on, whatever part of their time a container grants."""
    topology, cores = Path("/sys/devices/system/cpu"), set()
    for cpu in _cpus():
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_quota() -> int:
    """Whole CPUs that a container's quota grants; a large number where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 16


def available_bytes() -> float:
    """Memory that can be had without pushing others out; infinite where it cannot be found out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.strip()}
        free = (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return total_bytes()
    try:  # what a container may use in all
        return min(free, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return free


def total_bytes() -> float:
    """The machine's memory; infinite where it cannot be found out."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")
