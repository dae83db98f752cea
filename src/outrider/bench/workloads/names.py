"""The workloads that come with the program."""

BUILT_IN: tuple[str, ...] = ("chat", "code", "edits", "json", "summaries", "agent", "reasoning")
"""Their names; the prompts of each are in the file of that name beside this module."""
