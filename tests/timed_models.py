"""Models whose calls take as long as a script says, by a clock that only they move."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.backends.fake import FakeModel, FakeVocabulary
from outrider.core.data import Logits, Row, Span

VOCABULARY = FakeVocabulary("abcd ")

CallTime = Callable[[int, int, int], float]
"""Seconds of a call over so many tokens, with so many stored, of so many sequences."""


def stairs_s(num_tokens: int, stored: int = 0, num_sequences: int = 1) -> float:
    """A curve as CPUs have it: multiples of four are cheaper than what is just below them."""
    base = 0.06 * (1 + 0.3 * (num_tokens - 1) - (0.5 if num_tokens % 4 == 0 else 0))
    return base + stored * (4e-6 + 1e-6 * num_tokens) + 0.004 * (num_sequences - 1)


class TimedModel(FakeModel):
    """`now` is the time of its clock; a call adds what `call_time` says, times what `disturb` says."""

    def __init__(
        self, call_time: CallTime = stairs_s, disturb: Callable[[], float] = lambda: 1.0, **options: Any
    ) -> None:
        usual = {"context_length": 16384, "max_sequences": 1, "max_batch_tokens": 512}
        super().__init__(VOCABULARY, _no_logits, **(usual | options))
        self.now = 0.0
        self._call_time = call_time
        self._disturb = disturb

    def clock(self) -> float:
        return self.now

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        stored = sum(self.length(span.sequence) for span in spans)
        rows = super().decode(spans)
        tokens = sum(len(span.tokens) for span in spans)
        self.now += self._call_time(tokens, stored, len(spans)) * self._disturb()
        return rows


def _no_logits(_tokens: Sequence[int]) -> Row:
    return np.zeros(VOCABULARY.size, dtype=np.float32)


def noise(seed: int, spread: float = 0.05, outliers: float = 0.0) -> Callable[[], float]:
    """Factors around 1, of which a part (`outliers`) is 20 times as large."""
    rng = random.Random(seed)

    def factor() -> float:
        return rng.lognormvariate(0, spread) * (20 if rng.random() < outliers else 1)

    return factor
