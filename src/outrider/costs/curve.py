"""What a call of a model costs here: a measured curve that real calls keep refining."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.data import StepRecord
from outrider.core.errors import SettingError
from outrider.costs.points import MAX_TOKENS, CallPoint, Curve, fit
from outrider.costs.refinement import CONTEXT, SCALE, SEQUENCES, SHAPE, Refinement

SCHEMA = "outrider.costs/1"
"""of curves as JSON, alone or in pairs"""

_BAND_TOKENS = 64
"""Contexts this close share a table."""
_DRIFTED_RATIO = 1.25
_RETURNED_RATIO = 1.1
_LASTING_CALLS = 8
"""Calls for which a drift must last to be spoken of."""
_LEARNED_CALLS = 8
"""Calls of a size that make it a point of a refined curve."""
_MIN_CALLS = 3
"""of a size that make its ratio known, in a correction by recorded calls"""
_MAX_RATIO = 4.0
"""A larger ratio is a disturbance of the machine."""
_PREFILL_MIN_TOKENS = 16
"""Shorter reads of a prompt are calls like others, and say nothing about long ones."""


class CallCosts:
    """How long a call of one model takes, by its tokens, its context and its sequences.

    `points` are measured calls. Without any the curve is a cautious guess whose unit is set by the first
    call observed (`is_known`). `prefill_token_s` is what a token of a prompt took, None if unmeasured.
    A context is the number of tokens that the sequences of the call have stored, together. `window`: the
    model reads no more than the last so many tokens of a text (0: all).

    >>> costs = CallCosts([CallPoint(1, 0.1), CallPoint(3, 0.2), CallPoint(4, 0.15)])
    >>> costs.calls_s(4, context=0).round(3).tolist()
    [0.1, 0.15, 0.2, 0.15]
    """

    def __init__(
        self, points: Sequence[CallPoint] = (), *, prefill_token_s: float | None = None, window: int = 0
    ) -> None:
        self.points = tuple(points)
        self.window = window
        self.prefill_token_s = prefill_token_s
        if points and not any(point.num_tokens == point.num_sequences == 1 for point in points):
            raise SettingError("costs", "no call over a single token was measured", "Measure one.")
        self._fit = fit(self.points)
        self._learned = Refinement(
            [point for point in self.points if point.num_sequences == 1],
            knows_context=self._fit.knows_context,
            knows_sequences=self._fit.knows_sequences,
        )
        self._prefill_token_s = deque([prefill_token_s] if prefill_token_s else [], maxlen=5)
        self._tables: dict[tuple[int, int], Curve] = {}
        self._drifting = False
        self._against = 0
        self._said: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the curve was measured, rather than guessed."""
        return bool(self.points)

    @property
    def is_known(self) -> bool:
        """Whether its seconds mean anything: it was measured, or a call was observed."""
        return self.is_measured or self.num_observed > 0

    @property
    def num_observed(self) -> int:
        """Real calls that have refined it."""
        return self._learned.num_seen

    @property
    def drift(self) -> float:
        """Present times against the measured ones; 1 for a curve that was not measured."""
        return self._learned.scale if self.is_measured else 1.0

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

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds that reading a prompt of so many tokens takes, or as much of it as is read."""
        num_tokens = self.read_tokens(num_tokens)
        if self._prefill_token_s:
            return num_tokens * median(self._prefill_token_s)
        return num_tokens * self.call_s(MAX_TOKENS, context=0) / MAX_TOKENS

    def _table(self, context: int, num_sequences: int, size: int) -> Curve:
        state, fitted = self._learned.state, self._fit
        table = fitted.base_s * np.exp(state[SHAPE:])
        table += fitted.context_s * (context * math.exp(state[CONTEXT]))
        table += fitted.sequence_s * (num_sequences - 1) * math.exp(state[SEQUENCES])
        table *= math.exp(state[SCALE])
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
        state, place = self._learned.state, min(num_tokens, MAX_TOKENS) - 1
        scale = math.exp(state[SCALE])
        context_s = float(self._fit.context_s[place]) * context * math.exp(state[CONTEXT]) * scale
        sequences_s = self._fit.sequence_s * (num_sequences - 1) * math.exp(state[SEQUENCES]) * scale
        shares = (context_s / expected_s, sequences_s / expected_s)
        own = max(1.0 - sum(shares), 0.0)
        self._learned.update(num_tokens, (own, *shares), math.log(seconds / expected_s))
        self._tables.clear()
        self._watch()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Reading so many tokens of a prompt took so long."""
        if num_tokens >= _PREFILL_MIN_TOKENS and math.isfinite(seconds) and seconds > 0:
            self._prefill_token_s.append(seconds / num_tokens)

    def _watch(self) -> None:
        """Notice a drift that lasts, and its end."""
        drift = max(self.drift, 1 / self.drift)
        changed = drift < _RETURNED_RATIO if self._drifting else drift > _DRIFTED_RATIO
        self._against = self._against + 1 if changed else 0
        if self._against < _LASTING_CALLS:
            return
        self._drifting, self._against = not self._drifting, 0
        how = f"{self.drift:.2f}x the measured time" if self._drifting else "as long as measured again"
        self._said = f"calls take {how}: the cost curve follows"

    def notice(self) -> str | None:
        """A line for the user when calls have come to take 1.25 times as long as measured (or as
        little), or are back where they were; None if nothing changed since it was last asked for."""
        said, self._said = self._said, None
        return said

    def refined(self, *, scale: float = 1.0, shape: float = 1.0) -> CallCosts:
        """The curve with what was learned made part of its points.

        `scale` and `shape` (0 to 1) are the weights of what was learned about all calls alike and of
        what was learned about their differences, against what the points said before.
        """
        if not self.num_observed:
            return CallCosts(self.points, prefill_token_s=self.prefill_token_s, window=self.window)
        if not self.is_measured:
            scale = shape = 1.0
        weights = np.full(len(self._learned.state), shape)
        weights[SCALE] = scale
        old, new = CallCosts(self.points), CallCosts(self.points)
        new._learned.state = self._learned.state * weights
        learned = np.flatnonzero(self._learned.seen >= _LEARNED_CALLS) + 1 if shape else ()
        added = [CallPoint(int(n), old.call_s(int(n), context=0)) for n in learned]
        if not any(point.num_tokens == 1 for point in (*self.points, *added)):
            added.append(CallPoint(1, old.call_s(1, context=0), spread_ratio=0.2))
        token_s = median(self._prefill_token_s) if self._prefill_token_s else None
        return self._rescaled(lambda p: _at(new, p) / _at(old, p), added, token_s)

    def corrected(self, calls: Iterable[tuple[int, int, float]]) -> CallCosts:
        """The curve as real calls show it, each given by its tokens, its context and its seconds.

        Every size takes the median ratio of its real calls to the curve, other sizes their neighbours'.
        """
        ratios: dict[int, list[float]] = {}
        for num_tokens, context, seconds in calls:
            ratio = seconds / self.call_s(num_tokens, context=context)
            ratios.setdefault(num_tokens, []).append(ratio)
        known = {
            n: _bounded(median(found)) for n, found in sorted(ratios.items()) if len(found) >= _MIN_CALLS
        }
        if not known:
            return self
        sizes, values = np.log(list(known)), list(known.values())
        spread = next((point.spread_ratio for point in self.points), 0.05)
        added = [CallPoint(n, self.call_s(n, context=0), spread_ratio=spread) for n in known]
        return self._rescaled(
            lambda p: float(np.interp(np.log(p.num_tokens), sizes, values)), added, self.prefill_token_s
        )

    def corrected_by_drafts(self, records: Sequence[StepRecord], target: CallCosts) -> CallCosts:
        """A draft model's curve as the steps show it in which it drafted, with the engine's own time for
        each of its tokens made part of its calls.

        All times are those of a machine on which the `target`'s calls take what its curve says: a slow
        moment shows in the target's calls of the same steps, and is taken out. Calls that read of a prompt
        besides do not tell it.
        """
        steps = [record for record in records if record.work.calls and not record.read_tokens]
        if not steps:
            return self
        slowness = median(r.verify_s / target.call_s(r.num_evaluated, context=r.position) for r in steps)
        expected_s = [sum(self.call_s(n, context=r.position) for n in r.work.call_tokens) for r in steps]
        ratios = [r.work.model_s / s for r, s in zip(steps, expected_s, strict=True)]
        ratio = _bounded(median(ratios) / slowness)
        own_s = median(max(r.draft_s - r.work.model_s, 0.0) / r.work.calls for r in steps) / slowness
        read_s = sum(record.work.prefill_s for record in records) / slowness
        read_tokens = sum(record.work.prefill_tokens for record in records)
        token_s = read_s / read_tokens if read_s and read_tokens else self.prefill_token_s
        return self._rescaled(lambda _point: ratio, (), token_s, own_s)

    def _rescaled(
        self,
        ratio_of: Callable[[CallPoint], float],
        added: Iterable[CallPoint],
        prefill_token_s: float | None,
        extra_s: float = 0.0,
    ) -> CallCosts:
        """The curve through its points and those of `added` whose size it lacks, the time of each multiplied
        by its ratio and lengthened by `extra_s`."""
        there = {point.num_tokens for point in self.points if point.num_sequences == 1}
        points = [*self.points, *(point for point in added if point.num_tokens not in there)]
        points = [replace(p, seconds=p.seconds * ratio_of(p) + extra_s) for p in points]
        return CallCosts(points, prefill_token_s=prefill_token_s, window=self.window)

    # As plain data

    def as_json(self) -> dict[str, Any]:
        """The measured points as plain data; `refined` first makes what was learned part of them."""
        return {
            "schema": SCHEMA,
            "prefill_token_s": self.prefill_token_s,
            "window_tokens": self.window,
            "calls": [
                {key: getattr(point, name) for key, (name, _) in _KEYS.items()} for point in self.points
            ],
        }

    @classmethod
    def from_json(cls, data: Any, what: str = "costs") -> CallCosts:
        """The curve of `as_json`. Raises SettingError, which names `what`, for anything else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SettingError(what, f"it is not of the schema {SCHEMA}", "Measure again: outrider costs.")
        try:
            token_s = data.get("prefill_token_s")
            if token_s is not None and not 0 < (token_s := float(token_s)) < math.inf:
                raise ValueError(f"prefill_token_s is {token_s}")
            if (window := int(data.get("window_tokens", 0))) < 0:
                raise ValueError(f"window_tokens is {window}")
            return cls(list(map(_point, data["calls"])), prefill_token_s=token_s, window=window)
        except SettingError as error:
            raise SettingError(what, f"{error.what}: {error.why}", error.way_out) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it is damaged ({type(error).__name__}: {error})"
            raise SettingError(what, reason, "Measure again: outrider costs.") from None


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)


def _at(costs: CallCosts, point: CallPoint) -> float:
    return costs.call_s(point.num_tokens, context=point.context_tokens, num_sequences=point.num_sequences)


_KEYS: dict[str, tuple[str, type]] = {
    "tokens": ("num_tokens", int),
    "context_tokens": ("context_tokens", int),
    "sequences": ("num_sequences", int),
    "seconds": ("seconds", float),
    "spread_ratio": ("spread_ratio", float),
}
"""of a call as JSON: what it is called here, and its type"""


def _point(call: dict[str, Any]) -> CallPoint:
    return CallPoint(**{name: kind(call[key]) for key, (name, kind) in _KEYS.items() if key in call})
