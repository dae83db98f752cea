"""Measured calls, and the plain curve through them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.errors import SettingError

Curve = npt.NDArray[np.float64]
"""A value for every number of tokens, shape (MAX_TOKENS,): the first is for a single token."""

MAX_TOKENS = 64
"""The largest call whose time is kept for itself; larger ones continue the curve's end."""

SIZES: Curve = np.arange(1, MAX_TOKENS + 1, dtype=np.float64)

_UNMEASURED_S = 0.05
"""Assumed of a single token's call until the first one was seen."""
_UNMEASURED_TOKEN_RATIO = 0.35
"""What each further token is taken to cost, in calls of one: more than measured on most machines,
so that an unknown one is not speculated on lightly."""
_UNMEASURED_CONTEXT_RATIO = 1 / 8192
"""What each stored token is taken to add to a call."""
_UNMEASURED_SEQUENCE_RATIO = 0.02
"""What each further sequence is taken to add to a call, in calls of one token."""
_MIN_RATIO = 1e-3
"""Of what is unmeasured: a slope that came out at or below zero is noise, and a factor can still mend it."""


@dataclass(frozen=True, slots=True)
class CallPoint:
    """A call that was measured: `seconds` is the median of its samples and `spread_ratio` the
    standard error of that median, as a part of it. `switch_ratio`: right after a call of another size it
    takes so much longer, as a part of it (GPUs keep the work of the last call, and replay an equal one).

    The call evaluated `num_tokens` tokens of `num_sequences` sequences in all, which had
    `context_tokens` tokens stored together. Raises SettingError for what no call can be.
    """

    num_tokens: int
    seconds: float
    context_tokens: int = 0
    num_sequences: int = 1
    spread_ratio: float = 0.05
    switch_ratio: float = 0.0

    def __post_init__(self) -> None:
        what = f"a call over {self.num_tokens} tokens"
        if not 1 <= self.num_sequences <= self.num_tokens <= MAX_TOKENS or self.context_tokens < 0:
            reason = f"{self.num_sequences} sequences with {self.context_tokens} stored tokens cannot be"
            raise SettingError(what, reason, f"Give 1 to {MAX_TOKENS} tokens, and no more sequences.")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise SettingError(what, f"{self.seconds} s is not a time", "Give a positive number.")
        for name, ratio in (("spread", self.spread_ratio), ("switch", self.switch_ratio)):
            if not 0 <= ratio < math.inf:
                raise SettingError(what, f"a {name} of {ratio} cannot be", "Give 0 or more.")

    def as_json(self) -> dict[str, float]:
        """It as plain data."""
        values = {key: getattr(self, name) for key, (name, _) in _KEYS.items()}
        return values if self.switch_ratio else {k: v for k, v in values.items() if k != "switch_ratio"}

    @classmethod
    def from_json(cls, call: Mapping[str, Any]) -> CallPoint:
        """The point of `as_json`. Raises SettingError, KeyError, TypeError or ValueError for other data."""
        return cls(**{name: kind(call[key]) for key, (name, kind) in _KEYS.items() if key in call})


_KEYS: Mapping[str, tuple[str, type]] = {
    "tokens": ("num_tokens", int),
    "context_tokens": ("context_tokens", int),
    "sequences": ("num_sequences", int),
    "seconds": ("seconds", float),
    "spread_ratio": ("spread_ratio", float),
    "switch_ratio": ("switch_ratio", float),
}
"""of a call as JSON: the field, and its type"""


@dataclass(frozen=True, slots=True)
class Fit:
    """The curve through some points: a call over n tokens of m sequences with c tokens stored takes
    `base_s[n] + c * context_s[n] + (m - 1) * sequence_s` seconds, and so many times `switch[n]` more right
    after a call of another size."""

    base_s: Curve
    context_s: Curve
    sequence_s: float
    switch: Curve


def fit(points: Sequence[CallPoint]) -> Fit:
    """The curve that passes through the points of a single sequence, in straight lines between them:
    calls have stairs, which a smooth curve would lose. Without points it is a cautious guess."""
    by_size: dict[int, list[CallPoint]] = {}
    for point in points:
        if point.num_sequences == 1:
            by_size.setdefault(point.num_tokens, []).append(point)
    if not by_size:
        base = _UNMEASURED_S * (1 + _UNMEASURED_TOKEN_RATIO * (SIZES - 1))
        sequence_s = _UNMEASURED_SEQUENCE_RATIO * _UNMEASURED_S
        return Fit(base, base * _UNMEASURED_CONTEXT_RATIO, sequence_s, 0 * base)
    context_s = _context_slopes(by_size)

    def without_context(point: CallPoint) -> float:
        share = point.context_tokens * float(context_s[point.num_tokens - 1])
        return max(point.seconds - share, _MIN_RATIO * point.seconds)

    base_s = _through({n: median(map(without_context, by_size[n])) for n in sorted(by_size)})
    costs = []  # of further sequences
    for point in points:
        if point.num_sequences > 1:
            i = point.num_tokens - 1
            alone = base_s[i] + point.context_tokens * context_s[i]
            costs.append(float(point.seconds - alone) / (point.num_sequences - 1))
    usual_s = _UNMEASURED_SEQUENCE_RATIO * float(base_s[0])
    sequence_s = max(median(costs), _MIN_RATIO * usual_s) if costs else usual_s
    sizes = sorted(by_size)
    switch = np.interp(SIZES, sizes, [max(p.switch_ratio for p in by_size[n]) for n in sizes])
    return Fit(base_s, context_s, sequence_s, switch)


def _through(known: dict[int, float]) -> Curve:
    """Straight lines between values by size, ascending, that go on at the end as steeply as the whole of
    them: the last few alone may be noise."""
    sizes, values = list(known), list(known.values())
    curve = np.interp(SIZES, sizes, values)
    last = sizes[-1]
    if last < MAX_TOKENS:
        rise = values[-1] * _UNMEASURED_TOKEN_RATIO
        if len(sizes) > 1:
            rise = max((values[-1] - values[0]) / (last - sizes[0]), 0.0)
        curve[last:] = values[-1] + rise * (SIZES[last:] - last)
    return curve


def _context_slopes(by_size: dict[int, list[CallPoint]]) -> Curve:
    """Seconds that each stored token adds, by least squares at each size that tells."""
    slopes, usual = {}, {}
    for size, points in sorted(by_size.items()):
        lengths = np.array([point.context_tokens for point in points], dtype=np.float64)
        seconds = np.array([point.seconds for point in points])
        usual[size] = median(seconds.tolist()) * _UNMEASURED_CONTEXT_RATIO
        if np.ptp(lengths) > 0:
            slope = float(np.polyfit(lengths, seconds, 1)[0])
            slopes[size] = max(slope, _MIN_RATIO * _UNMEASURED_CONTEXT_RATIO * float(seconds.min()))
    return _through(slopes or usual)
