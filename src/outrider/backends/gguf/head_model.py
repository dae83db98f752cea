"""Heads as draft models: each has a context of its own, on its target's weights or on those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar, cast

import numpy as np

from outrider.backends.gguf.c_types import LibraryRefused
from outrider.backends.gguf.heads import Entry, HeadBatch, State
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.backends.gguf.options import MTP_CONTEXT, LoadOptions
from outrider.backends.rewinding import RewindSupport
from outrider.core.contracts import SavedState
from outrider.core.data import Block, Logits, Span
from outrider.core.errors import BackendError
from outrider.models.heads import CONFIDENCE, MARKOV, HeadFile


class HeadModel(GgufModel):
    """The Model of MTP layers, with as many sequences as the target has: the target's own, or those of
    `weights`. Tokens that come after what the target has evaluated, but for the first of them, are read one
    at a time: each needs the head's own hidden state of the one before. Raises OutOfMemory when its KV does
    not fit."""

    is_head: ClassVar[bool] = True
    _is_kept: ClassVar[bool] = True
    """whether a token with a row need not be read again"""
    context_type: ClassVar[int] = MTP_CONTEXT

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights | None = None) -> None:
        super().__init__(
            weights or target.weights,
            target.context_length,
            target.max_sequences,
            target.options if weights is None else weights.options_beside(target),
            capacity_tokens,
            support=RewindSupport("free"),  # its layers are attention alone
            beside=None if weights is None else target,
        )
        self.name = f"{target.name}, MTP head" if weights is None else weights.name
        self._beside = target
        layers = () if weights is None else weights.head.target_layers
        kept = None if layers else target.hidden
        self._states = kept or target.keep_hidden_states(layers)
        """the target's"""
        native = self._library.functions
        native.llama_set_embeddings_nextn(self._native.pointer, True, True)
        width = int(native.llama_model_n_embd_out(self.weights.handle))
        self._head_batch = HeadBatch(self._library, self._native.pointer, width)
        self._no_state: State = np.zeros(self._states.width, dtype=np.float32)
        self._own: dict[int, tuple[int, State]] = {}
        """the head's own state of each sequence's last token, and its position"""
        self._read: dict[int, int] = {}
        """tokens of each sequence that were read with the target's states"""

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        # Libraries give the states of some architectures' heads in the order of the rows, of others' in that
        # of the tokens: the same in calls in which every token has a row, or none.
        bodies = [body for span in spans if (body := self._known_part(span))]
        if bodies:
            super().decode(bodies)
            for body in bodies:
                self._note(body, None)
        read = {body.sequence: len(body.tokens) for body in bodies}
        waiting = [_after(span, read.get(span.sequence, 0)) for span in spans]
        rows: dict[int, Logits] = {}
        while waiting := [span for span in waiting if span.tokens]:
            singles = [span._replace(tokens=span.tokens[:1], rows=1) for span in waiting]
            found = super().decode(singles)
            for i, (single, logits) in enumerate(zip(singles, found, strict=True)):
                self._note(single, self._own_state(i))
                rows[single.sequence] = logits.copy()
            waiting = [_after(span, 1) for span in waiting]
        empty = np.empty((0, self.vocabulary.size), dtype=np.float32)
        return [rows[span.sequence] if span.rows else empty for span in spans]

    def _known_part(self, span: Span) -> Span | None:
        """The first tokens of a span that can be read at once, if any; not its last, where it has a row."""
        count = len(span.tokens) - span.rows
        if self._states.knows_any(span.sequence):  # else a call without a text is being measured
            known = (self._states.before(span.sequence, span.start + i) is not None for i in range(count))
            count = sum(takewhile(bool, known))
        return span._replace(tokens=span.tokens[:count], rows=0) if count else None

    def _note(self, span: Span, own: State | None) -> None:
        """The tokens of such a part, or a single one, were read; `own` is the head's state of the last."""
        read, end = self._read.get(span.sequence, 0), span.start + len(span.tokens)
        if read >= span.start:  # after a failed call it may have been more
            is_kept = self._is_kept or own is None
            with_targets = self._states.before(span.sequence, span.start) is not None
            self._read[span.sequence] = end if is_kept and with_targets else span.start
        if own is not None:
            self._own[span.sequence] = (end - 1, own)

    def _own_state(self, index: int) -> State:
        return self._head_batch.state(index)

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        del context
        return self._head_batch.evaluate(self._places(spans))

    def _places(self, spans: Sequence[Span]) -> list[Entry]:
        found = [[self._target_state(span, i) for i in range(len(span.tokens))] for span in spans]
        projected = iter(self._project([state for states in found for state in states if state is not None]))
        places = []
        for span, states in zip(spans, found, strict=True):
            first = len(span.tokens) - span.rows
            for i, (token, state) in enumerate(zip(span.tokens, states, strict=True)):
                before = self._own_before(span) if state is None else next(projected)
                places.append(Entry(span.sequence, span.start + i, token, before, i >= first))
        return places

    def _target_state(self, span: Span, index: int) -> State | None:
        is_measured = not span.rows and not self._states.knows_any(span.sequence)
        return self._states.none if is_measured else self._states.before(span.sequence, span.start + index)

    def _project(self, states: Sequence[State]) -> Sequence[State]:
        return states

    def _own_before(self, span: Span) -> State:
        at, own = self._own.get(span.sequence, (-1, self._no_state))
        return own if at == span.start - 1 else self._no_state

    def reach(self, sequence: int, length: int) -> int:
        # What it drafted it read with states of its own: with the target's it drafts better.
        return min(super().reach(sequence, length), self._read.get(sequence, 0))

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self._read[sequence] = min(self._read.get(sequence, 0), length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        super().copy(source, sequence, length)
        self._read[sequence] = min(self._read.get(source, 0), length)

    def restore(self, sequence: int, state: SavedState) -> None:
        super().restore(sequence, state)
        self._read[sequence] = state.extent.length


class ChainedModel(HeadModel):
    """The Model of several MTP layers, of which each drafts the token after that of the one before. Every
    layer reads all of the text, and what is drafted of it under the layers before."""

    _is_kept: ClassVar[bool] = False  # not all layers have read what was drafted from

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights | None = None) -> None:
        super().__init__(target, capacity_tokens, weights)
        self._num_layers = self.weights.num_heads
        self._chains: dict[int, list[Entry]] = {}
        """of each sequence, what is drafted from the target's last state"""
        self._ends: list[int] = []
        """of each chain in the last call"""

    def _own_state(self, index: int) -> State:
        return self._head_batch.state(self._ends[index])

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        places = self._places(spans)
        if spans[0].rows:
            return self._draft(context, spans, places)
        status = 0
        for layer in range(self._num_layers):
            # They lie in the same cells, each layer's in its own tensors.
            self._clear(places)
            status = status or self._under(context, layer, places)
        return status

    def _draft(self, context: Any, spans: Sequence[Span], places: Sequence[Entry]) -> int:
        chained: list[Entry] = []
        self._ends = []
        for span, place in zip(spans, places, strict=True):
            before = self._chains.get(span.sequence, [])
            # The head has only a state of its own before it.
            goes_on = self._states.before(span.sequence, span.start) is None
            goes_on = goes_on and self._states.knows_any(span.sequence)
            if not (goes_on and before and before[-1].position == span.start - 1):
                before = []
            self._chains[span.sequence] = [*(entry._replace(wanted=False) for entry in before), place]
            chained += self._chains[span.sequence]
            self._ends.append(len(chained) - 1)
        self._clear(chained)
        depth = max(len(self._chains[span.sequence]) for span in spans)
        return self._under(context, min(depth, self._num_layers) - 1, chained)

    def _clear(self, places: Sequence[Entry]) -> None:
        """Make room for tokens that lie there already, read under another layer."""
        first: dict[int, int] = {}
        for place in places:
            first.setdefault(place.sequence, place.position)
        for sequence, position in first.items():
            self._forget(sequence, position)

    def _under(self, context: Any, layer: int, places: Sequence[Entry]) -> int:
        self._library.functions.llama_set_nextn_layer_offset(context, layer)
        return self._head_batch.evaluate(places)


class EagleModel(HeadModel):
    """The Model of an EAGLE-3 head. It pairs each token with the state before it, so never reads a text's
    first."""

    context_type: ClassVar[int] = 0

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights) -> None:
        super().__init__(target, capacity_tokens, weights)
        width = int(self._library.functions.llama_model_n_embd(self.weights.handle))
        self._no_state = np.zeros(width, dtype=np.float32)

    def _project(self, states: Sequence[State]) -> list[State]:
        most = min(self.max_rows, self.micro_batch_tokens)
        try:
            parts = [states[i : i + most] for i in range(0, len(states), most)]
            return [state for part in parts for state in self._head_batch.encode(part, self._memory)]
        except LibraryRefused as refusal:
            raise BackendError(self.name, f"{self._library.title}: {refusal}") from None

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        # The first token alone is read where a row is asked for, which only measuring does.
        return super()._evaluate(context, [_without_first(span) for span in spans])


class AssistantModel(HeadModel):
    """The Model of a Gemma 4 assistant. Its layers attend to what the target stores, and store nothing: what
    it drafts all stands at the place of the text's last token."""

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        # What the target has read lies in its KV.
        drafting = [span for span in spans if span.rows]
        if not drafting:
            return 0
        return super()._evaluate(context, drafting)

    def _places(self, spans: Sequence[Span]) -> list[Entry]:
        at = {span.sequence: self._beside.length(span.sequence) for span in spans}
        return [place._replace(position=at[place.sequence]) for place in super()._places(spans)]


class BlockModel(HeadModel):
    """The Model of a block drafter (DFlash, DFlash2, DSpark). A span with a row gives the `Block` that comes
    after its last token, in one call over masks that leaves nothing behind."""

    context_type: ClassVar[int] = 0

    def __init__(self, target: GgufModel, capacity_tokens: int, weights: HeadWeights) -> None:
        super().__init__(target, capacity_tokens, weights)
        native, context, metadata = self._library.functions, self._native.pointer, weights.metadata
        tensors = weights.layout.tensors
        size = int(metadata("dflash.block_size") or _USUAL_BLOCK)
        self._size = min(size, self.max_rows, self.micro_batch_tokens)  # the library takes it in one part
        self._top = int(metadata("dflash.selector_top_k") or 0)
        starts_at_anchor = MARKOV in tensors and metadata("dflash.sample_from_anchor") != "false"
        self._first = 0 if starts_at_anchor else 1
        self.block: int = self._size - self._first
        """tokens that it drafts in a call"""
        self._has_confidence = CONFIDENCE in tensors
        self._mask = int(native.llama_vocab_mask(native.llama_model_get_vocab(weights.handle)))
        native.llama_set_causal_attn(context, metadata("dflash.attention.causal") == "true")
        if self._top:  # its candidates come without rows
            native.llama_set_embeddings_nextn(context, True, False)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        return GgufModel.decode(self, spans)  # not as heads do that read token by token

    def _answer(self, context: Any, spans: Sequence[Span]) -> list[Logits]:
        del context
        asking = [span for span in spans if span.rows]
        together = max(min(self.max_rows, self.micro_batch_tokens) // self._size, 1)
        self._inject(spans)
        found: dict[int, Logits] = {}
        for start in range(0, len(asking), together):
            # The library's buffers are good until its next call.
            found |= self._draft(asking[start : start + together], keep=len(asking) > together)
        empty = np.empty((0, self.vocabulary.size), dtype=np.float32)
        return [found.get(span.sequence, empty) for span in spans]

    def _inject(self, spans: Sequence[Span]) -> None:
        """Store the target's states of these spans, but for those of last tokens with a row."""
        unread: list[Entry] = []
        for span in spans:
            first, states = self._unread(span)
            stored = self._library.functions.llama_memory_seq_pos_max(self._memory, span.sequence)
            self._forget(span.sequence, first if first <= stored + 1 else -1)
            unread += [Entry(span.sequence, first + i, None, state) for i, state in enumerate(states)]
        for i in range(0, len(unread), self.micro_batch_tokens):
            self._evaluate_places(unread[i : i + self.micro_batch_tokens])

    def _unread(self, span: Span) -> tuple[int, list[State]]:
        """What it has to read before a span's last token, or all of the span where it has no row: the first
        position, and the states from there on. Those that were not kept are left out at the beginning."""
        target, sequence = self._states, span.sequence
        start = min(self._read.get(sequence, 0), span.start)
        end = span.start + len(span.tokens) - bool(span.rows)
        if not target.knows_any(sequence):  # a call without a text is being measured
            self._read[sequence] = end
            return start, [target.none] * (end - start)
        found = [target.before(sequence, position + 1) for position in range(start, end)]
        known = [state for state in found if state is not None]
        lost = sum(state is target.none for state in known)
        self._read[sequence] = start + len(known)
        # What the target has yet to evaluate again is read as nothing, and once more when it is known.
        return start + lost, known[lost:] + [target.none] * (len(found) - len(known))

    def _draft(self, spans: Sequence[Span], *, keep: bool) -> dict[int, Logits]:
        masks = (self._mask,) * (self._size - 1)
        rows = 0 if self._top else self._size
        blocks = [Span(s.sequence, (s.tokens[-1], *masks), s.start + len(s.tokens) - 1, rows) for s in spans]
        places = [
            Entry(span.sequence, span.start + i, token, None, bool(span.rows))
            for span in blocks
            for i, token in enumerate(span.tokens)
        ]
        self._evaluate_places(places)
        found_rows = self._rows(self._native.pointer, blocks)
        states = self._head_batch.states(len(places)) if self._top or self._has_confidence else None
        found: dict[int, Logits] = {}
        for i, (span, logits) in enumerate(zip(blocks, found_rows, strict=True)):
            own = None if states is None else states[i * self._size + self._first : (i + 1) * self._size]
            found[span.sequence] = cast(Logits, self._block(logits[self._first :], own, keep=keep))
            self._forget(span.sequence, self._read.get(span.sequence, 0))
        return found

    def _block(self, rows: Logits, own: State | None, *, keep: bool) -> Block:
        if own is not None and self._top:
            top = self._top
            scores = own[:, top : top + top * top].reshape(-1, top, top).copy()
            return Block(scores, own[:, :top].astype(np.int64))
        return Block(rows.copy() if keep else rows, None, None if own is None else own[:, 0].copy())

    def _evaluate_places(self, places: Sequence[Entry]) -> None:
        self._check(self._head_batch.evaluate(places), len(places))


_USUAL_BLOCK = 16
"""tokens, of files that do not say it; llama.cpp's"""


def open_own(target: GgufModel, capacity_tokens: int) -> HeadModel:
    """A context of a model's own MTP layers. Raises OutOfMemory."""
    return (ChainedModel if target.weights.num_heads > 1 else HeadModel)(target, capacity_tokens)


def _after(span: Span, count: int) -> Span:
    return span._replace(tokens=span.tokens[count:], start=span.start + count)


def _without_first(span: Span) -> Span:
    return span if span.start or span.rows else _after(span, 1)


class HeadWeights(Weights):
    """The weights of a file of heads, which run beside a target alone: `open_beside`."""

    def __init__(self, head: HeadFile, options: LoadOptions) -> None:
        self.head = head
        super().__init__(head.path, replace(options, heads=True))

    def _generates_text(self) -> bool:
        return True

    @cached_property
    def rewind_support(self) -> RewindSupport:
        return RewindSupport("free")

    def options_beside(self, target: GgufModel) -> LoadOptions:
        """The options of a context beside a target. An assistant attends to what the target stores."""
        if self.head.kind != "assistant":
            return self.options
        shared = ("cache_type_k", "cache_type_v", "full_window")
        given = {name: getattr(target.options, name) for name in shared}
        return replace(self.options, flash_attention=target.flash_attention, **given)

    def open_beside(self, target: GgufModel, capacity_tokens: int) -> HeadModel:
        kind = _KINDS.get(self.head.kind, ChainedModel if self.num_heads > 1 else HeadModel)
        return kind(target, capacity_tokens, self)


_KINDS: dict[str, type[HeadModel]] = {"eagle3": EagleModel, "dflash": BlockModel, "assistant": AssistantModel}
