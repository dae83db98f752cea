"""Heads as draft models: each has a context of its own, on its target's weights or on those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from outrider.backends.gguf.c_types import LibraryRefused
from outrider.backends.gguf.heads import HeadBatch, HeadStates, State
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import MTP_CONTEXT, LoadOptions
from outrider.backends.gguf.rewinding import RewindSupport
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError
from outrider.core.saved import SavedState
from outrider.models.heads import HeadFile


class HeadModel(GgufModel):
    """The Model of MTP layers, with as many sequences as the target has: the target's own, or those of
    `weights`.

    Tokens that come after what the target has evaluated, but for the first of them, are read one at a time:
    each needs the head's own hidden state of the one before. Raises OutOfMemory when its KV does not fit.
    """

    is_head: ClassVar[bool] = True
    context_type: ClassVar[int] = MTP_CONTEXT

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights | None = None) -> None:
        super().__init__(
            weights or target.weights,
            target.context_length,
            target.max_sequences,
            target.options if weights is None else weights.options,
            capacity_tokens,
            support=RewindSupport("free"),  # its layers are attention alone
            beside=None if weights is None else target,
        )
        self.name = f"{target.name}, MTP head" if weights is None else weights.name
        self._beside = target
        self._states = self._open_states(target)
        native = self._library.functions
        native.llama_set_embeddings_nextn(self._native.pointer, True, True)
        self._width = int(native.llama_model_n_embd(self.weights.handle))
        self._head_batch = HeadBatch(self._library, self._native.pointer, self._width)

    def _open_states(self, target: GgufModel) -> HeadStates:
        hidden = target.hidden or target.keep_hidden_states()
        return HeadStates(hidden, hidden.width)

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
        return self._head_batch.evaluate(spans, self._states.before(spans))

    def reach(self, sequence: int, length: int) -> int:
        # What it drafted it read with states of its own: with the target's it drafts better.
        return self._states.reach(sequence, super().reach(sequence, length))

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self._states.truncate(sequence, length)

    def restore(self, sequence: int, state: SavedState) -> None:
        super().restore(sequence, state)
        self._states.restored(sequence, state.extent.length)


class EagleModel(HeadModel):
    """The Model of an EAGLE-3 head. It pairs each token with the state of the one before, so that it never
    reads a text's first."""

    context_type: ClassVar[int] = 0

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights) -> None:
        self._layers = weights.head.target_layers
        super().__init__(target, capacity_tokens, weights)

    def _open_states(self, target: GgufModel) -> HeadStates:
        width = int(self._library.functions.llama_model_n_embd(self.weights.handle))
        return HeadStates(target.keep_hidden_states(self._layers), width, self._encode)

    def _encode(self, states: Sequence[State]) -> list[State]:
        most = min(self.max_rows, self.micro_batch_tokens)
        try:
            parts = [states[i : i + most] for i in range(0, len(states), most)]
            return [state for part in parts for state in self._head_batch.encode(part, self._memory)]
        except LibraryRefused as refusal:
            raise BackendError(self.name, f"{self._library.title}: {refusal}") from None

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        # The first token alone is read where a row is asked for, which only measuring does.
        return super()._evaluate(context, [_without_first(span) for span in spans])


def _after(span: Span, count: int) -> Span:
    """What is left of a span after its first tokens."""
    return replace(span, tokens=span.tokens[count:], start=span.start + count)


def _without_first(span: Span) -> Span:
    return span if span.start or span.rows else _after(span, 1)


class HeadWeights(Weights):
    """The weights of a file of heads, which run beside a target alone: `open_beside`.

    Raises what those of a model do.
    """

    def __init__(self, head: HeadFile, options: LoadOptions) -> None:
        self.head = head
        super().__init__(head.path, replace(options, heads=True))

    def _generates_text(self) -> bool:
        return True

    @cached_property
    def rewind_support(self) -> RewindSupport:
        return RewindSupport("free")

    def open_beside(self, target: GgufModel, capacity_tokens: int) -> HeadModel:
        """The head's context, for as many sequences as the target has. Raises OutOfMemory."""
        kind = EagleModel if self.head.kind == "eagle3" else HeadModel
        return kind(target, capacity_tokens, self)
