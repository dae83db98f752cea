"""Time that passes by being asked for: what is measured is the same on every run and every machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_READING_S = 2.0**-20
"""About a microsecond, and a power of two: differences are exact, whenever they begin."""


@contextmanager
def counted_time() -> Iterator[None]:
    """Meanwhile every reading of `perf_counter` in Outrider's modules is a little later than the one before.

    How long something takes then depends only on how often the clock is read in it, not on the machine.
    """
    readings = 0

    def perf_counter() -> float:
        nonlocal readings
        readings += 1
        return readings * _READING_S

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("outrider.") and "perf_counter" in vars(module):
                patch.setattr(module, "perf_counter", perf_counter)
        yield
