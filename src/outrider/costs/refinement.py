"""How real calls correct a measured curve: an extended Kalman filter over logarithms of times.

The time of a call is base × e^shape[n] + context × e^… + sequences × e^…, all of it times e^scale.
The scale may change from call to call (another program, a throttled or a warming CPU), the others
hardly. So one call says much about the scale, and something about its own size only in comparison
with others; the filter's covariances do that accounting. A call far off its expectation counts the
less the farther off it is (it may have met a page fault), until three in a row agree.

R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems" (1960).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from outrider.costs.points import MAX_TOKENS, SIZES, CallPoint

_Matrix = npt.NDArray[np.float64]

SCALE, CONTEXT, SEQUENCES, SHAPE = 0, 1, 2, 3
"""Places of the state: three factors, then one for every number of tokens; all logarithms."""

_STATES = SHAPE + MAX_TOKENS

# Variances of logarithms: 0.05**2 is about 5 % one way or the other.
_NOISE = 0.05**2
"""of a call around its expectation"""
_SCALE_CHANGE = 0.13 * _NOISE
"""of the scale from call to call: it then follows with three tenths of each surprise"""
_SLOW_CHANGE = 0.001**2
_SCALE_MEASURED = 0.1**2
_SCALE_UNKNOWN = 10.0**2
_FACTOR_MEASURED = 0.15**2
_FACTOR_UNKNOWN = 0.7**2
_STAIR = 0.15**2
"""of a size that was not measured, around the line between its neighbours"""
_STAIR_REACH = 0.15
"""in logarithms of sizes: how far a stair's error goes along with its neighbours'"""
_WALK = 0.15
"""of the curve's course where nothing was measured, for each e-fold of the size"""
_MIN_SPREAD = 0.02

_SURPRISE = 3.0
"""Standard deviations beyond which a call is doubted"""
_AGREEING = 3
"""Doubted calls that agree in a row before they are believed"""
_SCALE_DOUBT = 1.0
_STAIR_DOUBT = 0.25**2
_COURSE_DOUBT = 0.03
"""for each e-fold of the size: larger calls that were not seen lately go along in part"""
_MAX_DOUBT = 4.0

_LOGS = np.log(SIZES)
_NEAR: _Matrix = np.exp(-np.abs(_LOGS[:, None] - _LOGS[None, :]) / _STAIR_REACH)
_COURSE: _Matrix = np.minimum(_LOGS[:, None], _LOGS[None, :])
"""Covariance of a random walk over logarithms of sizes"""


def _shape_covariance(points: list[CallPoint]) -> _Matrix:
    """What is uncertain about the shape once these points are known: stairs beside them, and a random
    walk away from them. The single token is the shape's fixed point; its time is the scale."""
    stairs = _STAIR * _NEAR
    stairs[0, :] = stairs[:, 0] = 0.0
    unknown: _Matrix = _WALK * _COURSE + stairs
    if not points:
        return unknown
    spreads: dict[int, float] = {}
    for point in points:
        spread = max(point.spread_ratio, _MIN_SPREAD)
        spreads[point.num_tokens - 1] = min(spread, spreads.get(point.num_tokens - 1, math.inf))
    at = list(spreads)
    noise = np.diag([spread**2 for spread in spreads.values()])
    across = unknown[:, at]
    explained: _Matrix = across @ np.linalg.solve(unknown[np.ix_(at, at)] + noise, across.T)
    return unknown - (explained + explained.T) / 2


class Refinement:
    """What was learned about a curve since it was measured.

    `points` are the measured calls of a single sequence; without any, the first real call sets the scale.
    """

    def __init__(self, points: list[CallPoint], *, knows_context: bool, knows_sequences: bool) -> None:
        self.state = np.zeros(_STATES)
        self.seen = np.zeros(MAX_TOKENS, dtype=np.int64)
        """calls observed of each size"""
        self.num_seen = 0
        """calls observed of all sizes"""
        self._covariance = np.zeros((_STATES, _STATES))
        self._covariance[SHAPE:, SHAPE:] = _shape_covariance(points)
        self._covariance[SCALE, SCALE] = _SCALE_MEASURED if points else _SCALE_UNKNOWN
        for place, known in ((CONTEXT, knows_context), (SEQUENCES, knows_sequences)):
            self._covariance[place, place] = _FACTOR_MEASURED if known else _FACTOR_UNKNOWN
        self._change = np.full(_STATES, _SLOW_CHANGE)
        self._change[SCALE] = _SCALE_CHANGE
        self._run = 0
        self._runs = np.zeros(MAX_TOKENS, dtype=np.int64)

    @property
    def scale(self) -> float:
        """Present times against the measured ones."""
        return math.exp(self.state[SCALE])

    def update(self, num_tokens: int, shares: tuple[float, float, float], error: float) -> None:
        """A call over `num_tokens` took e^`error` of what was expected; `shares` are the parts of the
        expected time that go to the size, the stored context and the further sequences."""
        place = min(num_tokens, MAX_TOKENS) - 1
        parts = np.array((1.0, shares[1], shares[2], shares[0]))
        at = np.array((SCALE, CONTEXT, SEQUENCES, SHAPE + place))
        covariance = self._covariance
        covariance.flat[:: _STATES + 1] += self._change
        column = covariance[:, at] @ parts
        variance = float(parts @ column[at]) + _NOISE
        if error * error > _SURPRISE**2 * variance:
            if self._doubt(place, 1 if error > 0 else -1):
                column = covariance[:, at] @ parts
                variance = float(parts @ column[at]) + _NOISE
        else:
            self._run = 0
            self._runs[place] = 0
        weight = min(1.0, _SURPRISE**2 * variance / max(error * error, 1e-12))
        self.state += column * (weight * error / variance)
        covariance -= np.outer(column, column * (weight / variance))
        self.state[CONTEXT : SEQUENCES + 1] = np.clip(self.state[CONTEXT : SEQUENCES + 1], -3, 3)
        self.seen[place] += 1
        self.num_seen += 1

    def _doubt(self, place: int, sign: int) -> bool:
        """Count a surprising call. Where enough of them agree, what was known is put in doubt: the scale
        if they came in succession; the shape if they were of one size, and only near it while the
        scale could explain them as well."""
        self._run = self._run + sign if self._run * sign > 0 else sign
        run = self._runs[place]
        self._runs[place] = run + sign if run * sign > 0 else sign
        scale = abs(self._run) >= _AGREEING and self._covariance[SCALE, SCALE] < _MAX_DOUBT
        own = self._covariance[SHAPE + place, SHAPE + place]
        shape = abs(self._runs[place]) >= _AGREEING and own < _MAX_DOUBT
        if scale:
            self._covariance[SCALE, SCALE] += _SCALE_DOUBT
        if shape and scale:
            self._covariance[SHAPE:, SHAPE:] += _STAIR_DOUBT * np.outer(_NEAR[place], _NEAR[place])
        elif shape:
            self._covariance[SHAPE:, SHAPE:] += _STAIR_DOUBT * _NEAR + _COURSE_DOUBT * _COURSE
        return bool(scale or shape)
