"""How real calls correct a measured curve: moving averages of the logarithms by which it was off.

The rates were chosen in `benchmarks/policy/correction.py`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from outrider.costs.points import MAX_TOKENS, SIZES

_RATE = 0.3
"""of an error that moves the curve"""
_SURPRISE = 0.2
"""An error beyond it may be that of a moment (a page fault, another program): it is passed over, …"""
_AGREEING = 3
"""… unless so many in a row have the same sign."""
_BELIEVED_RATE = 0.7
_GUESS_DOUBT = 10.0
"""of what is guessed, over that of what was measured"""
_NEIGHBOUR_SHARE = 0.5
"""of a change at one size that goes to the sizes beside it, …"""
_REACH = 1.0
"""… and to those farther off exponentially less, by the logarithms of sizes."""

_LOGS = np.log(SIZES)
_ALL, _SEVERAL = 0, -1
"""beside the sizes: all calls, and those over several tokens"""


class Correction:
    """Logarithms of factors, each for what a call takes with nothing stored and for what stored tokens add to
    it: the `scale` of all calls, shape (2,), and the `shape` with one for each size, (2, MAX_TOKENS). That of
    a single token stays 0: its time is the scale."""

    def __init__(self, *, is_growth_guessed: bool = False) -> None:
        """`is_growth_guessed`: what stored tokens add was never measured, so it is the first to blame."""
        self._doubt = np.array([1.0, _GUESS_DOUBT if is_growth_guessed else 1.0])
        self.scale = np.zeros(2)
        self.shape = np.zeros((2, MAX_TOKENS))
        self.seen = np.zeros(MAX_TOKENS, dtype=np.int64)
        """calls observed of each size"""
        self._surprises: defaultdict[int, int] = defaultdict(int)
        """how many in a row, of all calls, of each size and of all but single tokens; below 0 where they took
        less than expected"""

    def observe(self, num_tokens: int, error: float, stored_share: float = 0.0) -> None:
        """A call over so many tokens took e^`error` times what was expected, of which stored tokens were to
        be this share. Each part changes as it could be to blame, both together by the error."""
        size = min(num_tokens, MAX_TOKENS)
        self.seen[size - 1] += 1
        parts = np.array([1 - stored_share, stored_share])
        change = error * self._doubt * parts / (self._doubt * parts @ parts)
        of_all, of_size = self._is_lasting(error, _ALL), self._is_lasting(error, size)
        of_size |= size > 1 and self._is_lasting(error, _SEVERAL)
        if abs(error) > _SURPRISE:
            if of_all:
                self.scale += _BELIEVED_RATE * change
            elif of_size:
                self._bend(size, _BELIEVED_RATE * change)
        elif size == 1:
            self.scale += _RATE * change
        else:
            self.scale += _RATE / 2 * change
            self._bend(size, _RATE * change)

    def _bend(self, size: int, change: npt.NDArray[np.float64]) -> None:
        share = _NEIGHBOUR_SHARE * np.exp(-np.abs(_LOGS - _LOGS[size - 1]) / _REACH)
        share[0] = 0.0
        share[size - 1] = 1.0
        self.shape += np.outer(change, share)
        self.scale += self.shape[:, 0]
        self.shape -= self.shape[:, :1]

    def _is_lasting(self, error: float, calls: int) -> bool:
        """Whether enough surprises among such calls agree."""
        row, sign = self._surprises[calls], 1 if error > 0 else -1
        self._surprises[calls] = 0 if abs(error) <= _SURPRISE else sign + (row if row * sign > 0 else 0)
        return abs(self._surprises[calls]) >= _AGREEING
