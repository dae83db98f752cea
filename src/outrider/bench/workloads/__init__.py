"""Workloads: prompts read from JSON-lines files, and those that come with the program."""

from outrider.bench.workloads.names import BUILT_IN
from outrider.bench.workloads.reading import load_workload

__all__ = ["BUILT_IN", "load_workload"]
