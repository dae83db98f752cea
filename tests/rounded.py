"""Fake models whose logits depend on more than the tokens, as those of real kernels do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines import VOCABULARY
from outrider.backends.bitwise import BitwiseModel, EqualSizes
from outrider.backends.fake import FakeModel, FakeVocabulary, NextLogits, random_logits
from outrider.core.contracts import SavedState
from outrider.core.data import Logits, Span


@dataclass(frozen=True, slots=True)
class Rounding:
    """`kernels` are the last sizes of calls that each kernel takes; a call of more rows or tokens is
    another kernel's. With `mixes` the cells that other sequences have in the cache count too. The difference
    goes into what is stored, and on from there."""

    kernels: tuple[int, ...] = ()
    mixes: bool = True

    def kernel(self, size: int) -> int:
        """The number of the kernel that takes a call of this size."""
        return sum(size > last for last in self.kernels)


class RoundedModel(FakeModel):
    """A FakeModel, rounded."""

    def __init__(
        self, vocabulary: FakeVocabulary, next_logits: NextLogits, rounding: Rounding, **options: Any
    ) -> None:
        super().__init__(vocabulary, next_logits, **options)
        self._rounding = rounding
        self._marks: dict[int, list[int]] = {}
        """how each stored token was rounded, for every sequence"""

    def _evaluate(self, span: Span) -> Logits:
        num_tokens = sum(len(each.tokens) for each in self.calls[-1])
        kernel = self._rounding.kernel(sum(each.rows for each in self.calls[-1]))
        marks = self._marks.setdefault(span.sequence, [])
        lengths = range(span.start + 1, span.start + len(span.tokens) + 1)
        marks[span.start :] = [self._mark(span.sequence, num_tokens, length) for length in lengths]
        rows = super()._evaluate(span)
        for i, row in enumerate(
            rows, len(marks) - span.rows + 1
        ):  # noise that the history of roundings fixes
            row += random_logits(len(row), order=i + 1, scale=1.0)((*marks[:i], kernel))
        return rows

    def _mark(self, sequence: int, num_tokens: int, length: int) -> int:  # noqa: ARG002
        """What the KV of a text's last token, the `length`th, was rounded by: the kernel, and the cells of
        others beside its own."""
        others = (self.length(other) for other in range(self.max_sequences) if other != sequence)
        return self._rounding.kernel(num_tokens) + 1000 * sum(others) * self._rounding.mixes

    def copy(self, source: int, sequence: int, length: int) -> None:
        super().copy(source, sequence, length)
        self._marks[sequence] = self._marks[source][:length]

    def save(self, sequence: int) -> SavedState:
        saved = super().save(sequence)
        marks = np.array(self._marks[sequence][: self.length(sequence)], dtype=np.int64)
        return SavedState(saved.extent, (*saved.parts, marks.view(np.uint8)))

    def restore(self, sequence: int, state: SavedState) -> None:
        super().restore(sequence, state)
        self._marks[sequence] = state.parts[1].view(np.int64).tolist()


def bitwise(
    next_logits: NextLogits, rounding: Rounding, sizes: Sequence[int], num_sequences: int = 1
) -> BitwiseModel:
    """Rounded lanes that are called in these sizes alone."""

    def lane(length: int) -> RoundedModel:
        options = {"max_sequences": 1, "max_batch_tokens": 128, "max_rows": 128}
        return RoundedModel(VOCABULARY, next_logits, rounding, context_length=length, **options)

    return BitwiseModel(lane, EqualSizes(tuple(sizes)), context_length=256, max_sequences=num_sequences)


class NearTie(FakeModel):
    """A FakeModel whose two best logits lie `MARGIN` apart after so many tokens (`at`), and are swapped in
    calls over several tokens, so many `times`."""

    MARGIN = 0.125

    def __init__(
        self,
        vocabulary: FakeVocabulary,
        next_logits: NextLogits,
        *at: int,
        times: int = 10**9,
        **options: Any,
    ) -> None:
        super().__init__(vocabulary, next_logits, **options)
        self.at = at
        self._times = times

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        rows = super().decode(spans)
        for span, logits in zip(spans, rows, strict=True):
            for i, row in enumerate(logits):
                if span.start + len(span.tokens) - span.rows + i + 1 in self.at:
                    best, second = np.argsort(row)[[-1, -2]]
                    swapped = len(span.tokens) > 1 and self._times > 0
                    self._times -= swapped
                    row[best] = row[second] + (-self.MARGIN if swapped else self.MARGIN)
        return rows
