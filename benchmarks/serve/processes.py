"""Processor time and memory of a server, with all that it started. Made for Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from llama_server import Server


def cpu_s(server: Server) -> float:
    """Processor time used so far, by all its threads and by children that have ended."""
    times = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def rss_bytes(server: Server) -> int:
    """Memory in use by the process and its children."""
    return sum(map(_rss_bytes, _family(server.pid)))


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return
    for child in " ".join(lists).split():
        yield from _family(int(child))


def _rss_bytes(pid: int) -> int:
    try:
        resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(resident) * os.sysconf("SC_PAGE_SIZE")
