"""How real calls correct a measured curve: moving averages of the logarithms by which it was off.

The rates were chosen in `benchmarks/policy/correction.py`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from outrider.costs.points import MAX_TOKENS, SIZES

_RATE = 0.3
"""of an error that moves the curve"""
_SURPRISE = 0.2
"""An error beyond it may be that of a moment (a page fault, another program): it is passed over, …"""
_AGREEING = 3
"""… unless so many in a row have the same sign."""
_BELIEVED_RATE = 0.7
_NEIGHBOUR_SHARE = 0.5
"""of a change at one size that goes to the sizes beside it, …"""
_REACH = 1.0
"""… and to those farther off exponentially less, by the logarithms of sizes."""

_LOGS = np.log(SIZES)
_ALL = 0


class Correction:
    """Logarithms of factors: the `scale` of all calls, and the `shape`, which is one for each size. That of a
    single token stays 0: its time is the scale."""

    def __init__(self) -> None:
        self.scale = 0.0
        self.shape = np.zeros(MAX_TOKENS)
        self.seen = np.zeros(MAX_TOKENS, dtype=np.int64)
        """calls observed of each size"""
        self._surprises: defaultdict[int, int] = defaultdict(int)
        """how many in a row, of all calls and of each size; below 0 where they took less than expected"""

    def observe(self, num_tokens: int, error: float) -> None:
        """A call over so many tokens took e^`error` times what was expected."""
        size = min(num_tokens, MAX_TOKENS)
        self.seen[size - 1] += 1
        of_all, of_size = self._is_lasting(error, _ALL), self._is_lasting(error, size)
        if abs(error) > _SURPRISE:
            if of_all:
                self.scale += _BELIEVED_RATE * error
            elif of_size:
                self._bend(size, _BELIEVED_RATE * error)
        elif size == 1:
            self.scale += _RATE * error
        else:
            self.scale += _RATE / 2 * error
            self._bend(size, _RATE * error)

    def _bend(self, size: int, change: float) -> None:
        share = _NEIGHBOUR_SHARE * np.exp(-np.abs(_LOGS - _LOGS[size - 1]) / _REACH)
        share[0] = 0.0
        share[size - 1] = 1.0
        self.shape += change * share
        self.scale += self.shape[0]
        self.shape -= self.shape[0]

    def _is_lasting(self, error: float, calls: int) -> bool:
        """Whether enough surprises among such calls agree."""
        row, sign = self._surprises[calls], 1 if error > 0 else -1
        self._surprises[calls] = 0 if abs(error) <= _SURPRISE else sign + (row if row * sign > 0 else 0)
        return abs(self._surprises[calls]) >= _AGREEING
