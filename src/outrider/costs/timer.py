"""One timed call after another, on a model whose sequences are this module's for the time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Literal, Self

from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Span
from outrider.core.errors import BackendError
from outrider.costs.points import MAX_TOKENS, CallPoint

Rows = Literal["all", "last"]
"""The rows of logits that a call gives: all for a target, the last for a draft model."""

Clock = Callable[[], float]
"""Seconds from any start, never going back."""

_WARM_UP = (1, 4, 1)
_CHUNK_TOKENS = 128
"""Tokens of a prompt read at once: few, so that Ctrl-C and the budget are heeded in between."""
FIRM_ROUNDS = 5
_MAX_ROUNDS = 15
_FIRM_RATIO = 0.015
"""Standard error of a median below which it needs no further samples."""
_DEVIATIONS_PER_MAD = 1.4826
_MIN_SWITCH_RATIO = 0.03
_FEW_RATIO = 0.3
"""What a single sample may be off by"""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise"""


class CallTimer:
    """Times calls of random ordinary tokens. As a context manager it leaves every sequence of the model
    empty, and makes some calls first that are not timed: they read the weights and start the threads. `top`:
    rows are asked for as `Span.top` says."""

    def __init__(self, model: Model, rows: Rows, clock: Clock, rng: random.Random, *, top: int = 0) -> None:
        self._top = top
        self._model = model
        self._rows = rows
        self._clock = clock
        self._tokens = ordinary_tokens(model.vocabulary, rng)
        self.largest = min(MAX_TOKENS, model.max_batch_tokens, model.context_length)
        if rows == "all":
            self.largest = min(self.largest, model.max_rows)

    def clear(self) -> None:
        """Leave every sequence of the model empty."""
        for sequence in range(self._model.max_sequences):
            self._model.truncate(sequence, 0)

    def stored(self) -> int:
        """Tokens in the first sequence."""
        return self._model.length(0)

    def __enter__(self) -> Self:
        try:
            self.clear()
            for size in _WARM_UP:
                if size <= self.largest:
                    self.call_s(size)
        except BaseException:
            self.clear()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.clear()

    def call_s(self, num_tokens: int, num_sequences: int = 1) -> float:
        """Seconds of one call over so many tokens, shared out evenly; what it stored is forgotten."""
        spans, given = [], 0
        for sequence in range(num_sequences):
            upto = num_tokens * (sequence + 1) // num_sequences
            length = self._model.length(sequence)
            tokens = self._take(length, upto - given)
            rows = len(tokens) if self._rows == "all" else 1
            spans.append(Span(sequence, tokens, length, rows, checkpoint=rows > 1, top=self._top))
            given = upto
        before = self._clock()
        self._model.decode(spans)
        seconds = self._clock() - before
        for span in spans:
            self._model.truncate(span.sequence, self._model.reach(span.sequence, span.start))
        return seconds

    def fill(self, num_tokens: int) -> float:
        """Store up to so many further tokens in the first sequence, in one call; its seconds per token."""
        length = self._model.length(0)
        tokens = self._take(length, min(num_tokens, _CHUNK_TOKENS, self._model.max_batch_tokens))
        before = self._clock()
        self._model.decode([Span(0, tokens, length, 0)])
        return (self._clock() - before) / len(tokens)

    def _take(self, start: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._tokens[i % len(self._tokens)] for i in range(start, start + num_tokens))


def ordinary_tokens(vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Tokens of ordinary text, drawn again each time: what a call costs may depend on them where a
    model sends tokens to different experts."""
    drawn = [rng.randrange(vocabulary.size) for _ in range(8 * MAX_TOKENS)]
    ordinary = [t for t in drawn if not vocabulary.is_control(t) and not vocabulary.ends_generation(t)]
    if not ordinary:
        raise BackendError("vocabulary", "it has no ordinary tokens to measure with", "Choose another model.")
    return ordinary


@dataclass(slots=True)
class Samples:
    """The times of one kind of call."""

    num_tokens: int
    context_tokens: int = 0
    num_sequences: int = 1
    seconds: list[float] = field(default_factory=list)
    switched_s: list[float] = field(default_factory=list)
    """right after calls of another kind, where `seconds` are of later ones"""

    @property
    def switch_ratio(self) -> float:
        """How much longer those take, as a part of the median; 0 where it may be noise."""
        ratio = median(self.switched_s) / self.median_s - 1 if self.switched_s else 0.0
        return ratio if ratio > max(_MIN_SWITCH_RATIO, 2 * self.spread_ratio) else 0.0

    @property
    def median_s(self) -> float:
        """The middle time; of two the shorter, since what disturbs a call only prolongs it."""
        return median(self.seconds) if len(self.seconds) > 2 else median_low(self.seconds)

    @property
    def spread_ratio(self) -> float:
        """Standard error of the median, as a part of it; a guess while there are too few samples to tell."""
        if len(self.seconds) < 3:
            return _FEW_RATIO / len(self.seconds)
        middle = median(self.seconds)
        deviation = median(abs(seconds - middle) for seconds in self.seconds)
        error: float = _MEDIAN_ERROR * _DEVIATIONS_PER_MAD * deviation / len(self.seconds) ** 0.5
        return error / middle if middle > 0 else 0.0

    @property
    def is_firm(self) -> bool:
        """Whether further samples would hardly change the median."""
        number = len(self.seconds)
        return number >= _MAX_ROUNDS or (number >= FIRM_ROUNDS and self.spread_ratio < _FIRM_RATIO)

    def point(self) -> CallPoint:
        """What goes into the curve."""
        return CallPoint(
            self.num_tokens,
            self.median_s,
            self.context_tokens,
            self.num_sequences,
            self.spread_ratio,
            self.switch_ratio,
        )
