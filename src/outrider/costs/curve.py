"""What a call of a model costs here: a measured curve that real calls keep correcting."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.errors import SettingError

SCHEMA = "outrider.costs/1"  # of curves as JSON, alone or in pairs
MAX_TOKENS = 64  # the largest call whose time is kept for itself; larger ones continue the curve's end

Curve = npt.NDArray[np.float64]
"""A value for every number of tokens, shape (MAX_TOKENS,): the first is for a single token."""

_SIZES: Curve = np.arange(1, MAX_TOKENS + 1, dtype=np.float64)
_BAND_TOKENS = 64  # contexts this close share a table
_RELAXATION = 0.1  # of what was learned that goes each time
_PREFILL_RATE = 0.4  # of an error that moves what a prompt's token takes
_PREFILL_MIN_TOKENS = 16  # shorter reads of a prompt are calls like others, and say nothing about long ones
_LEARNED_CALLS = 8  # of a size, that make it a point of a refined curve

# What is unmeasured: a single token's call until the first one was seen; what each further token is taken to
# cost, in calls of one (more than on most machines); what each stored token is taken to add to a call. A
# slope that came out at or below zero is noise, and a factor can still mend it: it has the least ratio.
_UNMEASURED_S, _UNMEASURED_TOKEN_RATIO, _UNMEASURED_CONTEXT_RATIO = 0.05, 0.35, 1 / 8192
_MIN_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class CallPoint:
    """A call that was measured. Raises SettingError for what no call can be."""

    num_tokens: int
    seconds: float  # the median of its samples
    context_tokens: int = 0  # others that were stored
    spread_ratio: float = 0.05  # the median's standard error, as a part of it

    def __post_init__(self) -> None:
        is_call = 1 <= self.num_tokens <= MAX_TOKENS and self.context_tokens >= 0
        if not (is_call and 0 < self.seconds < math.inf and 0 <= self.spread_ratio < math.inf):
            what = f"a call over {self.num_tokens} tokens with {self.context_tokens} stored"
            why = f"{self.seconds} s (± {self.spread_ratio}) cannot be"
            raise SettingError(what, why, "Measure it again.")

    @property
    def kind(self) -> tuple[int, int]:
        return self.num_tokens, self.context_tokens


def fit(points: Sequence[CallPoint]) -> tuple[Curve, Curve]:
    """The curve that passes through the points, in straight lines between them: calls have stairs, which a
    smooth curve would lose. Seconds of a call with nothing stored, and those that each stored token adds.
    Without points it is a cautious guess."""
    by_size: defaultdict[int, list[CallPoint]] = defaultdict(list)
    for point in sorted(points, key=lambda point: point.kind) or [CallPoint(1, _UNMEASURED_S)]:
        by_size[point.num_tokens].append(point)
    context_s = _context_slopes(by_size)

    def without_context(point: CallPoint) -> float:
        share = point.context_tokens * float(context_s[point.num_tokens - 1])
        return max(point.seconds - share, _MIN_RATIO * point.seconds)

    return _through({n: median(map(without_context, found)) for n, found in by_size.items()}), context_s


def _through(known: Mapping[int, float]) -> Curve:
    """Straight lines between values by size, ascending, that go on as steeply as the whole of them: the last
    few alone may be noise."""
    sizes, values = list(known), list(known.values())
    rise = values[-1] * _UNMEASURED_TOKEN_RATIO
    if len(sizes) > 1:
        rise = max((values[-1] - values[0]) / (sizes[-1] - sizes[0]), 0.0)
    return np.interp(_SIZES, sizes, values) + rise * np.maximum(_SIZES - sizes[-1], 0.0)


def _context_slopes(by_size: Mapping[int, Sequence[CallPoint]]) -> Curve:
    """Seconds that each stored token adds, by least squares at each size that tells."""
    slopes, usual = {}, {}
    for size, points in by_size.items():
        lengths, seconds = [p.context_tokens for p in points], [p.seconds for p in points]
        usual[size] = median(seconds) * _UNMEASURED_CONTEXT_RATIO
        if max(lengths) > min(lengths):
            slope = float(np.polyfit(lengths, seconds, 1)[0])
            slopes[size] = max(slope, _MIN_RATIO * _UNMEASURED_CONTEXT_RATIO * min(seconds))
    return _through(slopes or usual)


# How real calls correct a measured curve: moving averages of the logarithms by which it was off. The rates
# were chosen on made traces (benchmarks/policy). An error beyond _SURPRISE may be that of a moment (a page
# fault, another program): it is passed over, unless _AGREEING in a row have the same sign.

_RATE, _BELIEVED_RATE = 0.3, 0.7  # of an error, and of such a one, that moves the curve
_SURPRISE, _AGREEING = 0.2, 3
_GUESS_DOUBT = 10.0  # of what is guessed, over that of what was measured

_LOGS = np.log(_SIZES)
_ALL, _SEVERAL = 0, -1  # beside the sizes: all calls, and those over several tokens


class Correction:
    """Logarithms of factors, each for what a call takes with nothing stored and for what stored tokens add to
    it: the `scale` of all calls, shape (2,), and the `shape` with one for each size, (2, MAX_TOKENS). That of
    a single token stays 0: its time is the scale."""

    def __init__(self, *, is_growth_guessed: bool) -> None:
        """`is_growth_guessed`: what stored tokens add was never measured, so it is the first to blame."""
        self._doubt = np.array([1.0, _GUESS_DOUBT if is_growth_guessed else 1.0])
        self.scale = np.zeros(2)
        self.shape = np.zeros((2, MAX_TOKENS))
        self.seen = np.zeros(MAX_TOKENS, dtype=np.int64)  # calls observed of each size
        # Surprises in a row, by size and of several: above 0 where calls took longer than expected.
        self._surprises = Counter[int]()

    def observe(self, size: int, error: float, stored_share: float) -> None:
        """A call over so many tokens took e^`error` times what was expected, of which stored tokens were to
        be this share. Each part changes as it could be to blame, both together by the error."""
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
        """Half of a change at one size goes to the sizes beside it, and less to those farther off."""
        share = 0.5 * np.exp(-np.abs(_LOGS - _LOGS[size - 1]))
        share[0] = 0.0
        share[size - 1] = 1.0
        self.shape += np.outer(change, share)
        self.scale += self.shape[:, 0]
        self.shape -= self.shape[:, :1]

    def _is_lasting(self, error: float, calls: int) -> bool:
        row, sign = self._surprises[calls], 1 if error > 0 else -1
        self._surprises[calls] = 0 if abs(error) <= _SURPRISE else sign + (row if row * sign > 0 else 0)
        return abs(self._surprises[calls]) >= _AGREEING


class CallCosts:
    """How long a call of one model takes, by its tokens, of whatever sequences, and its context: the tokens
    that these sequences have stored, together.

    Args:
        points: Measured calls; without any the curve is a cautious guess in units of the first call observed.
        prefill_token_s: What a token of a prompt took; None if unmeasured.
        window: The model reads no more than the last so many tokens of a text (0: all).
        switch_s: How much longer a call takes after one of another size.
        is_estimate: The points come from a glance, and real calls say more than they do.

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
        switch_s: float = 0.0,
        is_estimate: bool = False,
    ) -> None:
        self.points, self.prefill_token_s = tuple(points), prefill_token_s
        self.window, self.switch_s, self.is_estimate = window, switch_s, is_estimate
        if points and not any(point.num_tokens == 1 for point in points):
            raise SettingError("costs", "no call over a single token was measured", "Measure one.")
        self._base_s, self._context_s = fit(self.points)
        # The longest context of a call that was measured or observed.
        self._longest = max((point.context_tokens for point in points), default=0)
        self._learned = Correction(is_growth_guessed=not self._longest)
        self._prefill_error = 0.0
        self._tables: dict[int, Curve] = {}

    @property
    def is_measured(self) -> bool:
        """Rather than estimated or guessed."""
        return bool(self.points) and not self.is_estimate

    @property
    def is_known(self) -> bool:
        """Its seconds mean something: calls were measured or observed."""
        return bool(self.points) or self.num_observed > 0

    @property
    def num_observed(self) -> int:
        return int(self._learned.seen.sum())

    @property
    def drift(self) -> float:
        """Present times against measured ones, where nothing is stored; 1 if none were measured."""
        return math.exp(self._learned.scale[0]) if self.is_measured else 1.0

    # Asking

    def calls_s(self, most: int, *, context: int, others: int = 0) -> Curve:
        """Seconds of a call over `others + 1`, …, `others + most` tokens, shape (most,), read-only."""
        band = (context + _BAND_TOKENS // 2) // _BAND_TOKENS
        table = self._tables.get(band)
        if table is None or len(table) < others + most:
            table = self._tables[band] = self._table(band * _BAND_TOKENS, others + most)
        return table[others : others + most]

    def call_s(self, num_tokens: int, *, context: int) -> float:
        return float(self.calls_s(1, context=context, others=num_tokens - 1)[0])

    def read_tokens(self, num_tokens: int) -> int:
        """How many of so many tokens, which it has not seen, the model reads."""
        return min(num_tokens, self.window) if self.window else num_tokens

    def prefill_s(self, num_tokens: int, *, context: int = 0) -> float:
        """Seconds that reading so many tokens of a prompt takes, or as many of them as are read, where
        `context` tokens are stored."""
        num_tokens = self.read_tokens(num_tokens)
        token_s = self.prefill_token_s or float(self._base_s[-1]) / MAX_TOKENS
        token_s *= math.exp(self._learned.scale[0] + self._prefill_error)
        grown_s = self.call_s(MAX_TOKENS, context=context + num_tokens // 2)
        return num_tokens * token_s * grown_s / self.call_s(MAX_TOKENS, context=0)

    def _table(self, context: int, size: int) -> Curve:
        empty, stored = np.exp(self._learned.scale[:, None] + self._learned.shape)
        table: Curve = self._base_s * empty + self._context_s * context * stored
        if size > MAX_TOKENS:
            half = MAX_TOKENS // 2
            rise = max(float(table[-1] - table[half - 1]) / (MAX_TOKENS - half), 0.0)
            table = np.append(table, table[-1] + rise * np.arange(1, size - MAX_TOKENS + 1))
        table.flags.writeable = False
        return table

    # Learning

    def observe(self, num_tokens: int, seconds: float, *, context: int) -> None:
        """A real call took so long. Times that are no positive number are passed over."""
        if not 0 < seconds < math.inf:
            return
        size, learned = min(num_tokens, MAX_TOKENS), self._learned
        expected_s = self.call_s(num_tokens, context=context)
        grown = math.exp(learned.scale[1] + learned.shape[1, size - 1])
        stored_s = float(self._context_s[size - 1]) * context * grown
        error = math.log(seconds / expected_s)
        if not self.is_known:
            learned.scale += error
            error = 0.0
        learned.observe(size, error, min(stored_s / expected_s, 1.0))
        self._longest = max(self._longest, context)
        self._tables.clear()

    def observe_prefill(self, num_tokens: int, seconds: float, *, context: int = 0) -> None:
        """Reading so many tokens of a prompt, with `context` tokens stored, took so long."""
        if num_tokens >= _PREFILL_MIN_TOKENS and 0 < seconds < math.inf:
            error = math.log(seconds / self.prefill_s(num_tokens, context=context))
            self._prefill_error += _PREFILL_RATE * error

    def follow(self, other: CallCosts, context: int) -> None:
        """No call was seen for a while: what was learned about all calls alike gives way to the present drift
        of another model here, and what was learned about prompts is forgotten, since what slowed this one
        down may be over. Before any call at half of such a context was seen, stored tokens are taken to add
        as much to a call, in parts, as they add to the other's."""
        learned = self._learned
        if self._longest < context / 2 and context >= _BAND_TOKENS:
            share = other.call_s(1, context=context) / other.call_s(1, context=0) - 1
            own_s = self.call_s(1, context=context) - self.call_s(1, context=0)
            learned.scale[1] += math.log(share * self.call_s(1, context=0) / own_s)
        if self.is_measured:
            learned.scale += _RELAXATION * (math.log(other.drift) - learned.scale[0])
            self._prefill_error *= 1 - _RELAXATION
        self._tables.clear()

    def refined(self, weight: float = 1.0) -> CallCosts:
        """The curve with what was learned made part of its points: those that were measured move a part of
        the way (`weight`, 0 to 1), and what was not measured is added as it was seen, but for the drift."""
        weight = weight if self.is_measured else 1.0
        known, measured = CallCosts(self.points), {point.kind for point in self.points}
        sizes = {n for n in range(1, MAX_TOKENS + 1) if self._learned.seen[n - 1] >= _LEARNED_CALLS}
        sizes |= {1} if self.is_known else set()
        contexts = {0, self._longest} if self._longest > known._longest else {0}
        held_back, points = self.drift ** (weight - 1), []
        for point in self.points:
            size, context = point.kind
            ratio = self.call_s(size, context=context) / known.call_s(size, context=context)
            points.append(replace(point, seconds=point.seconds * ratio**weight))
        for n, context in sorted({(n, context) for n in sizes for context in contexts} - measured):
            points.append(CallPoint(n, self.call_s(n, context=context) * held_back, context))
        has_read = self.prefill_token_s is not None or self._prefill_error != 0
        token_s = self.prefill_s(1) * held_back if has_read else None
        return CallCosts(
            points,
            prefill_token_s=token_s,
            window=self.window,
            switch_s=self.switch_s,
            is_estimate=self.is_estimate,
        )

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """The measured points as plain data; `refined` first makes what was learned part of them."""
        return {
            "schema": SCHEMA,
            "prefill_token_s": self.prefill_token_s,
            "window_tokens": self.window,
            **({"switch_s": self.switch_s} if self.switch_s else {}),
            **({"estimated": True} if self.is_estimate else {}),
            "calls": [
                {"tokens": n, "context_tokens": context, "seconds": seconds, "spread_ratio": spread}
                for n, seconds, context, spread in map(astuple, self.points)
            ],
        }

    @classmethod
    def from_json(cls, data: Any, what: str = "costs") -> CallCosts:
        """The curve of `as_json`. Raises SettingError, which names `what`, for anything else."""
        way_out = "Measure again: outrider costs."
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SettingError(what, f"not of the schema {SCHEMA}", way_out)
        try:
            window, switch_s = int(data.get("window_tokens", 0)), float(data.get("switch_s", 0.0))
            token_s = None if data.get("prefill_token_s") is None else float(data["prefill_token_s"])
            if window < 0 or not 0 <= switch_s < math.inf or not 0 < (token_s or 1.0) < math.inf:
                raise ValueError(f"a window of {window} tokens, {token_s} s a token of a prompt")
            points = []
            for call in data["calls"]:
                context, spread = int(call.get("context_tokens", 0)), float(call.get("spread_ratio", 0.05))
                points.append(CallPoint(int(call["tokens"]), float(call["seconds"]), context, spread))
            is_estimate = data.get("estimated") is True
            return cls(
                points, prefill_token_s=token_s, window=window, switch_s=switch_s, is_estimate=is_estimate
            )
        except (SettingError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{error.what}: {error.why}" if isinstance(error, SettingError) else repr(error)
            raise SettingError(what, f"it is damaged ({reason})", way_out) from None
