"""What a call of a model costs here: a measured curve that real calls keep refining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.core.errors import SettingError
from outrider.costs.correction import Correction
from outrider.costs.points import MAX_TOKENS, CallPoint, Curve, fit

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
