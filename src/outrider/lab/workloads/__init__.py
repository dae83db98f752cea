"""Workloads: prompts read from JSON-lines files, and those that come with the program."""

from outrider.lab.workloads.reading import BUILT_IN, load_workload

__all__ = ["BUILT_IN", "load_workload"]
