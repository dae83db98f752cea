"""What a call of a model costs here: a measured curve that real calls keep refining."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.errors import SettingError

SCHEMA = "outrider.costs/1"
"""of curves as JSON, alone or in pairs"""

_BAND_TOKENS = 64
"""Contexts this close share a table."""
_RELAXATION = 0.1
"""of what was learned that goes each time"""
_PREFILL_RATE = 0.4
"""of an error that moves what a prompt's token takes"""
_LEARNED_CALLS = 8
"""Calls of a size that make it a point of a refined curve."""
_PREFILL_MIN_TOKENS = 16
"""Shorter reads of a prompt are calls like others, and say nothing about long ones."""

Curve = npt.NDArray[np.float64]
"""A value for every number of tokens, shape (MAX_TOKENS,): the first is for a single token."""

MAX_TOKENS = 64
"""The largest call whose time is kept for itself; larger ones continue the curve's end."""

SIZES: Curve = np.arange(1, MAX_TOKENS + 1, dtype=np.float64)

_UNMEASURED_S = 0.05
"""Assumed of a single token's call until the first one was seen."""
_UNMEASURED_TOKEN_RATIO = 0.35
"""What each further token is taken to cost, in calls of one: more than on most machines."""
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

    The call evaluated `num_tokens` tokens of `num_sequences` sequences, which had `context_tokens` tokens
    stored together. Raises SettingError for what no call can be.
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
        names = {key: name for key, (name, _) in _KEYS.items() if key != "switch_ratio" or self.switch_ratio}
        return {key: getattr(self, name) for key, name in names.items()}

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


# How real calls correct a measured curve: moving averages of the logarithms by which it was off. The rates
# were chosen on made traces (benchmarks/policy).

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


class CallCosts:
    """How long a call of one model takes, by its tokens, its context and its sequences.

    `points` are measured calls. Without any the curve is a cautious guess whose unit is set by the first
    call observed (`is_known`). `prefill_token_s` is what a token of a prompt took, None if unmeasured.
    A context is the number of tokens that the sequences of the call have stored, together. `window`: the
    model reads no more than the last so many tokens of a text (0: all). `is_estimate`: the points come from a
    glance, and real calls say more than they do.

    Plain decoding repeats calls of one size, drafts change it: where that matters (`switch_ratio`), a call
    over one token of each sequence is taken to follow an equal one, and any other not to.

    >>> costs = CallCosts([CallPoint(1, 0.1), CallPoint(3, 0.2), CallPoint(4, 0.15)])
    >>> costs.calls_s(4, context=0).round(3).tolist()
    [0.1, 0.15, 0.2, 0.15]
    """

    def __init__(
        self,
        points: Sequence[CallPoint] = (),
        *,
        prefill_token_s: float | None = None,
        window: int = 0,
        is_estimate: bool = False,
    ) -> None:
        self.points = tuple(points)
        self.is_estimate = is_estimate
        self.window = window
        self.prefill_token_s = prefill_token_s
        if points and not any(point.num_tokens == point.num_sequences == 1 for point in points):
            raise SettingError("costs", "no call over a single token was measured", "Measure one.")
        self._fit = fit(self.points)
        self._longest = max((point.context_tokens for point in points), default=0)
        """the longest context of a call that was measured or observed"""
        self._learned = Correction(is_growth_guessed=not self._longest)
        self._prefill_error = 0.0
        self._has_prefilled = prefill_token_s is not None
        self._tables: dict[tuple[int, int], Curve] = {}
        self._last, self._num_equal = 0, 0
        """tokens of the last call that was observed, and how many in a row had as many"""

    @property
    def is_measured(self) -> bool:
        """Whether the curve was measured, rather than estimated or guessed."""
        return bool(self.points) and not self.is_estimate

    @property
    def is_known(self) -> bool:
        """Whether its seconds mean anything: calls were measured or observed."""
        return bool(self.points) or self.num_observed > 0

    @property
    def num_observed(self) -> int:
        """Real calls that have refined it."""
        return int(self._learned.seen.sum())

    @property
    def drift(self) -> float:
        """Present times against the measured ones, where nothing is stored; 1 for a curve that was not
        measured."""
        return math.exp(self._learned.scale[0]) if self.is_measured else 1.0

    # Asking

    def calls_s(
        self, most: int, *, context: int, others: int = 0, num_sequences: int = 1
    ) -> npt.NDArray[np.float64]:
        """Seconds of a call over `others + 1`, …, `others + most` tokens, shape (most,), read-only.

        `others` are tokens that other sequences have in the same call.
        """
        band = (context + _BAND_TOKENS // 2) // _BAND_TOKENS
        table = self._tables.get((band, num_sequences))
        if table is None or len(table) < others + most:
            size = max(MAX_TOKENS, others + most)
            table = self._table(band * _BAND_TOKENS, num_sequences, size)
            self._tables[band, num_sequences] = table
        return table[others : others + most]

    def call_s(self, num_tokens: int, *, context: int, num_sequences: int = 1) -> float:
        """Seconds of a call over so many tokens."""
        return float(self.calls_s(1, context=context, others=num_tokens - 1, num_sequences=num_sequences)[0])

    def read_tokens(self, num_tokens: int) -> int:
        """How many of so many tokens, which it has not seen, the model reads."""
        return min(num_tokens, self.window) if self.window else num_tokens

    def prefill_s(self, num_tokens: int, *, context: int = 0) -> float:
        """Seconds that reading so many tokens of a prompt takes, or as many of them as are read, where
        `context` tokens are stored."""
        num_tokens = self.read_tokens(num_tokens)
        token_s = self.prefill_token_s or float(self._fit.base_s[-1]) / MAX_TOKENS
        token_s *= math.exp(self._learned.scale[0] + self._prefill_error)
        return num_tokens * token_s * self._growth(context + num_tokens // 2)

    def _growth(self, context: int) -> float:
        """Of a long call, over the same one with nothing stored."""
        return self.call_s(MAX_TOKENS, context=context) / self.call_s(MAX_TOKENS, context=0)

    def _table(self, context: int, num_sequences: int, size: int) -> Curve:
        fitted, learned = self._fit, self._learned
        empty, stored = np.exp(learned.scale[:, None] + learned.shape)
        table: Curve = (fitted.base_s + fitted.sequence_s * (num_sequences - 1)) * empty
        table += fitted.context_s * context * stored
        table[num_sequences:] *= 1 + fitted.switch[num_sequences:]
        if size > MAX_TOKENS:
            half = MAX_TOKENS // 2
            rise = max(float(table[-1] - table[half - 1]) / (MAX_TOKENS - half), 0.0)
            table = np.append(table, table[-1] + rise * np.arange(1, size - MAX_TOKENS + 1))
        table.flags.writeable = False
        return table

    # Learning

    def observe(self, num_tokens: int, seconds: float, *, context: int, num_sequences: int = 1) -> None:
        """A real call took so long. Times that are no positive number are passed over."""
        if not (math.isfinite(seconds) and seconds > 0) or num_tokens < 1:
            return
        expected_s = self.call_s(num_tokens, context=context, num_sequences=num_sequences)
        self._num_equal = self._num_equal + 1 if num_tokens == self._last else 0
        self._last, size = num_tokens, min(num_tokens, MAX_TOKENS)
        if switch := float(self._fit.switch[size - 1]):
            if self._num_equal == 1:  # the second of equal calls prepares those after it
                return
            is_plain = num_tokens <= num_sequences
            if is_plain and not self._num_equal:
                expected_s *= 1 + switch
            elif self._num_equal and not is_plain:
                expected_s /= 1 + switch
        error = math.log(seconds / expected_s)
        grown = math.exp(self._learned.scale[1] + self._learned.shape[1, size - 1])
        stored_s = float(self._fit.context_s[size - 1]) * context * grown
        if not self.is_known:
            self._learned.scale += error
            error = 0.0
        self._learned.observe(num_tokens, error, min(stored_s / expected_s, 1.0))
        self._longest = max(self._longest, context)
        self._tables.clear()

    def relax(self, drift: float) -> None:
        """No call was seen for a while: what was learned about all calls alike gives way to the present
        `drift` of another model here, and what was learned about prompts is forgotten. What slowed this model
        down may be over, and one that seems too slow is not asked again."""
        if self.is_measured:
            self._learned.scale += _RELAXATION * (math.log(drift) - self._learned.scale[0])
            self._prefill_error *= 1 - _RELAXATION
            self._tables.clear()

    def observe_prefill(self, num_tokens: int, seconds: float, *, context: int = 0) -> None:
        """Reading so many tokens of a prompt, with `context` tokens stored, took so long."""
        if num_tokens >= _PREFILL_MIN_TOKENS and math.isfinite(seconds) and seconds > 0:
            error = math.log(seconds / self.prefill_s(num_tokens, context=context))
            self._prefill_error += _PREFILL_RATE * error
            self._has_prefilled = True

    def follow(self, other: CallCosts, context: int) -> None:
        """Before any call at half of such a context was seen, stored tokens are taken to add as much to this
        model's calls, in parts, as they add to another's."""
        if self._longest < context / 2 and context >= _BAND_TOKENS:
            share = other.call_s(1, context=context) / other.call_s(1, context=0) - 1
            own_s = self.call_s(1, context=context) - self.call_s(1, context=0)
            self._learned.scale[1] += math.log(share * self.call_s(1, context=0) / own_s)
            self._tables.clear()

    def refined(self, *, scale: float = 1.0, shape: float = 1.0) -> CallCosts:
        """The curve with what was learned made part of its points.

        Args:
            scale: Weight, 0 to 1, of what was learned about all calls alike.
            shape: Weight of what was learned about the sizes.
        """
        if not self.is_measured:
            scale = shape = 1.0
        learned, longest = self._learned, max(p.context_tokens for p in self.points) if self.points else 0
        weights = np.array([scale, scale if longest else 1.0])  # what was guessed is learned whole
        empty, stored = np.exp((weights * learned.scale)[:, None] + shape * learned.shape)
        there = {(p.num_tokens, p.context_tokens) for p in self.points if p.num_sequences == 1}
        seen = {n for n in range(1, MAX_TOKENS + 1) if shape and learned.seen[n - 1] >= _LEARNED_CALLS}
        single = {1} if self.is_known else set[int]()
        prefill_token_s = self.prefill_s(1) * math.exp((scale - 1) * learned.scale[0])
        contexts = [0, *([self._longest] if self._longest > longest else [])]
        new = sorted({(n, context) for n in seen | single for context in contexts} - there)
        base_s, context_s = self._fit.base_s, self._fit.context_s
        points = [
            CallPoint(
                n, float(base_s[n - 1] + c * context_s[n - 1]), c, switch_ratio=float(self._fit.switch[n - 1])
            )
            for n, c in new
        ]

        def factor(point: CallPoint) -> float:
            i, c = point.num_tokens - 1, point.context_tokens
            now_s = base_s[i] * empty[i] + c * context_s[i] * stored[i]
            return float(now_s / (base_s[i] + c * context_s[i]))

        return CallCosts(
            [replace(p, seconds=p.seconds * factor(p)) for p in (*self.points, *points)],
            prefill_token_s=prefill_token_s if self._has_prefilled else None,
            window=self.window,
            is_estimate=self.is_estimate,
        )

    def in_shape_of(self, known: CallCosts) -> CallCosts:
        """An estimate: the few points of this curve and, where it has none, those of a `known` one, drawn
        through what this one has beside them."""
        own = {p.num_tokens: p.seconds for p in self.points if p.num_sequences == 1 and not p.context_tokens}
        sizes = np.log(sorted(own))
        errors = [math.log(own[n] / known.call_s(n, context=0)) for n in sorted(own)]
        kinds = {(p.num_tokens, p.context_tokens, p.num_sequences) for p in self.points}
        borrowed = [
            replace(p, seconds=p.seconds * math.exp(np.interp(math.log(p.num_tokens), sizes, errors)))
            for p in known.points
            if (p.num_tokens, p.context_tokens, p.num_sequences) not in kinds
        ]
        return CallCosts(
            [*self.points, *borrowed],
            prefill_token_s=self.prefill_token_s,
            window=self.window,
            is_estimate=True,
        )

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """The measured points as plain data; `refined` first makes what was learned part of them."""
        return {
            "schema": SCHEMA,
            "prefill_token_s": self.prefill_token_s,
            "window_tokens": self.window,
            **({"estimated": True} if self.is_estimate else {}),
            "calls": [point.as_json() for point in self.points],
        }

    @classmethod
    def from_json(cls, data: Any, what: str = "costs") -> CallCosts:
        """The curve of `as_json`. Raises SettingError, which names `what`, for anything else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SettingError(what, f"not of the schema {SCHEMA}", "Measure again: outrider costs.")
        try:
            token_s = data.get("prefill_token_s")
            if token_s is not None and not 0 < (token_s := float(token_s)) < math.inf:
                raise ValueError(f"prefill_token_s is {token_s}")
            if (window := int(data.get("window_tokens", 0))) < 0:
                raise ValueError(f"window_tokens is {window}")
            return cls(
                list(map(CallPoint.from_json, data["calls"])),
                prefill_token_s=token_s,
                window=window,
                is_estimate=data.get("estimated") is True,
            )
        except SettingError as error:
            raise SettingError(what, f"{error.what}: {error.why}", error.way_out) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it is damaged ({type(error).__name__}: {error})"
            raise SettingError(what, reason, "Measure again: outrider costs.") from None
