"""How many examples a property is tried with."""

from hypothesis import settings

_FULL = 100
"""Examples of a property that asks for no number of its own, under the profile `full`."""
_LEAST = 5


def examples(full: int) -> int:
    """`full` under the profile of that name, and its share of them under a smaller one."""
    return max(min(full, _LEAST), full * settings().max_examples // _FULL)
