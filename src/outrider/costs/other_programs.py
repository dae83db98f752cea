"""How busy other programs keep this machine's processor while something is measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import NamedTuple

STAT = Path("/proc/stat")
_DISTURBING_CORES = 0.25  # that others take from the threads of a model from which on they disturb
_MIN_SECONDS = 0.25  # less time says little: the system counts in hundredths of a second for each core
_LOOK_S = 0.33


class CpuTime(NamedTuple):
    """Seconds from any start: of the clock, of work on this process's cores, and of its own work."""

    wall_s: float
    busy_s: float
    own_s: float


def read_cpu_time() -> CpuTime | None:
    """What the system has counted up to now; None where it does not say (it is not Linux)."""
    try:
        ticks_per_s, cores = os.sysconf("SC_CLK_TCK"), os.sched_getaffinity(0)
        rows = [line.split() for line in STAT.read_text().splitlines()]
        of_cores = [row[1:9] for row in rows if row and row[0].removeprefix("cpu") in map(str, cores)]
        # user, nice, system, idle, waiting for a disk, interrupts (two kinds), and what other machines took.
        ticks = sum(sum(map(int, row)) - sum(map(int, row[3:5])) for row in of_cores)
    except (AttributeError, OSError, ValueError):
        return None
    return CpuTime(monotonic(), ticks / ticks_per_s, process_time())


class OtherPrograms:
    """Watches them from then on."""

    def __init__(self, read: Callable[[], CpuTime | None] = read_cpu_time) -> None:
        self._read, self._first = read, read()

    def cores(self) -> float:
        """How many cores they kept busy since, on average; 0 where that is not known."""
        first, last = self._first, self._read()
        if first is None or last is None or last.wall_s - first.wall_s < _MIN_SECONDS:
            return 0.0
        seconds = last.wall_s - first.wall_s
        return max((last.busy_s - first.busy_s) - (last.own_s - first.own_s), 0.0) / seconds

    def disturb(self, spare_cores: float) -> bool:
        """Whether they took more than the cores that a model's threads leave free."""
        return self.cores() > max(spare_cores, 0.0) + _DISTURBING_CORES


def look() -> OtherPrograms:
    """What they do at the moment, from a third of a second."""
    others = OtherPrograms()
    sleep(_LOOK_S)
    return others
