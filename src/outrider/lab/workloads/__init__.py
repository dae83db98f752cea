"""Workloads: prompts read from JSON-lines files, and those that come with the program."""

from outrider.lab.workloads.reading import load_workload
from outrider.lab.workloads.spec import BUILT_IN

__all__ = ["BUILT_IN", "load_workload"]
