"""A model's own head as a draft model: a context of its own on the target's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from outrider.backends.gguf.heads import HeadBatch, HeadStates
from outrider.backends.gguf.model import GgufModel
from outrider.backends.gguf.rewinding import Rewinding
from outrider.core.data import Logits, Span
from outrider.core.saved import SavedState


class HeadModel(GgufModel):
    """The Model of a target's own head (MTP), with as many sequences as the target has.

    Tokens that come after what the target has evaluated, but for the first of them, are read one at a time:
    each needs the head's own hidden state of the one before. Raises OutOfMemory when its KV does not fit.
    """

    is_head: ClassVar[bool] = True

    def __init__(self, target: GgufModel, capacity_tokens: int) -> None:
        super().__init__(
            target.weights,
            target.context_length,
            target.max_sequences,
            target.options,
            capacity_tokens,
            rewinding=Rewinding("free"),  # its layers are attention alone
        )
        self.name = f"{target.name}, MTP head"
        hidden = target.hidden or target.keep_hidden_states()
        self._states = HeadStates(hidden)
        native = self._library.functions
        native.llama_set_embeddings_nextn(self._native.pointer, True, True)
        self._head_batch = HeadBatch(self._library, self._native.pointer, hidden.width)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        """As every model's, but for no more than the last row of each span."""
        # Libraries give the states of some architectures' heads in the order of the rows, of others' in that
        # of the tokens: the same in calls in which every token has a row, or none.
        bodies = [body for span in spans if (body := self._states.known_part(span))]
        if bodies:
            super().decode(bodies)
            for body in bodies:
                self._states.after_call(body, None)
        read = {body.sequence: len(body.tokens) for body in bodies}
        waiting = [_after(span, read.get(span.sequence, 0)) for span in spans]
        rows: dict[int, Logits] = {}
        while waiting := [span for span in waiting if span.tokens]:
            singles = [replace(span, tokens=span.tokens[:1], rows=1) for span in waiting]
            found = super().decode(singles)
            for i, (single, logits) in enumerate(zip(singles, found, strict=True)):
                self._states.after_call(single, self._head_batch.state(i))
                rows[single.sequence] = logits.copy()
            waiting = [_after(span, 1) for span in waiting]
        empty = np.empty((0, self.vocabulary.size), dtype=np.float32)
        return [rows[span.sequence] if span.rows else empty for span in spans]

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        del context
        return self._head_batch.evaluate(spans, [self._states.before(span) for span in spans])

    def reach(self, sequence: int, length: int) -> int:
        # What it drafted it read with states of its own: with the target's it drafts better.
        return self._states.reach(sequence, super().reach(sequence, length))

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self._states.truncate(sequence, length)

    def restore(self, sequence: int, state: SavedState) -> None:
        super().restore(sequence, state)
        self._states.restored(sequence, state.extent.length)

    def close(self) -> None:
        self._head_batch.close()
        super().close()


def _after(span: Span, count: int) -> Span:
    """What is left of a span after its first tokens."""
    return replace(span, tokens=span.tokens[count:], start=span.start + count)
