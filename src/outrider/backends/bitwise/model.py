"""A model that makes calls of equal sizes only, and keeps every sequence to itself.

What is summed up in a call depends, in its last bits, on how many tokens the call has and on where in the
cache a sequence's tokens lie among others'. So each sequence has a context of its own on the shared weights,
in which its tokens lie in order from the first cell on, and every native call has one of the sizes that
were found to give equal bits (`backends.bitwise.probe`). Engine, policy and the reuse of KV need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from outrider.backends.bitwise.probe import EqualSizes
from outrider.core.calls import check_copy, check_spans
from outrider.core.contracts import FREE
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, OutriderError, RewindUnsupported
from outrider.core.saved import SavedState, SavingModel


class BitwiseModel:
    """A Model over one context for each sequence. `open_lane` opens one of `context_length` tokens, which
    has to be able to rewind; as many are opened at once as there are sequences.

    A call of fewer tokens than an equal size has is padded with a filler that is forgotten again, a longer
    span is evaluated in several calls. Rows are asked for of a whole call or not at all, since how many
    there are is a size as well.
    """

    rewinding = FREE
    attends_to_all = False

    def __init__(
        self,
        open_lane: Callable[[int], SavingModel],
        sizes: EqualSizes,
        *,
        context_length: int,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
    ) -> None:
        self.sizes = sizes
        self._lanes: list[SavingModel] = []
        try:
            for _ in range(max_sequences):  # fillers need a little room beyond the context
                self._lanes.append(open_lane(context_length + sizes.padding))
        except BaseException:
            self.close()
            raise
        self.inner = self._lanes[0]
        """one of the contexts, to be asked for what all of them have in common"""
        self.name = self.inner.name
        self.vocabulary = self.inner.vocabulary
        self.max_sequences = max_sequences
        self.context_length = min(context_length, self.inner.context_length - sizes.padding)
        self.capacity_tokens = min(
            capacity_tokens or context_length * max_sequences, self.context_length * max_sequences
        )
        self.max_batch_tokens = self.inner.max_batch_tokens
        self.max_rows = self.inner.max_rows
        if sizes.most > min(self.max_rows, self.max_batch_tokens):
            raise BackendError(self.name, f"it makes no calls of {sizes.most} tokens", "Probe it again.")

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        check_spans(self, spans)  # a lane would find out too late, when others have been evaluated
        try:
            return [self._evaluate(self._lanes[span.sequence], span) for span in spans]
        except BaseException:  # an interrupt as well
            for span in spans:
                lane = self._lanes[span.sequence]
                with suppress(OutriderError):
                    lane.truncate(0, min(span.start, lane.length(0)))
                if lane.length(0) > span.start:
                    lane.truncate(0, 0)
            raise

    def _evaluate(self, lane: SavingModel, span: Span) -> Logits:
        """The wanted rows of one span; views where they come from a single call."""
        rows: list[Logits] = []
        start, first = 0, len(span.tokens) - span.rows
        for num_tokens, size in self.sizes.parts(len(span.tokens)):
            end = start + num_tokens
            tokens = span.tokens[start:end] + (span.tokens[end - 1],) * (size - num_tokens)
            wanted = max(end - max(start, first), 0)
            logits = lane.decode([Span(0, tokens, span.start + start, size if wanted else 0)])[0]
            if size > num_tokens:
                lane.truncate(0, span.start + end)
            if wanted:
                rows.append(logits[num_tokens - wanted : num_tokens])
                if end < len(span.tokens):
                    rows[-1] = rows[-1].copy()
            start = end
        if not rows:
            return np.empty((0, self.vocabulary.size), dtype=np.float32)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def length(self, sequence: int) -> int:
        if not 0 <= sequence < self.max_sequences:
            raise BackendError("sequence", f"there is none numbered {sequence}")
        return self._lanes[sequence].length(0)

    def reach(self, sequence: int, length: int) -> int:  # noqa: ARG002
        return length

    def truncate(self, sequence: int, length: int) -> None:
        self.length(sequence)
        self._lanes[sequence].truncate(0, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        check_copy(self, source, sequence, length)
        lane = self._lanes[sequence]
        lane.restore(0, self._lanes[source].save(0))
        try:
            lane.truncate(0, length)
        except RewindUnsupported:
            lane.truncate(0, 0)
            raise

    def save(self, sequence: int) -> SavedState:
        self.length(sequence)
        return self._lanes[sequence].save(0)

    def restore(self, sequence: int, state: SavedState) -> None:
        self.length(sequence)
        self._lanes[sequence].restore(0, state)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
