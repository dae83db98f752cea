"""A model's own heads (MTP): layers of its file that predict the tokens after the next one.

A head reads a token together with the target's hidden state of the position before it, and gives logits and
a hidden state of its own. So it drafts like a small model that shares the target's weights: what is committed
it reads with the target's states, what it drafts with its own (DeepSeek-V3 technical report, 2024, section
2.2; llama.cpp's contexts of type MTP).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outrider.backends.gguf.c_types import BOOL, ENUM, INT, POINTER, LibraryRefused, Signatures, functions
from outrider.core.data import Span

if TYPE_CHECKING:
    from outrider.backends.gguf.library import Library

State = npt.NDArray[np.float32]
"""The hidden state of one position, shape (width,)."""


class Embedding(ctypes.Structure):
    """llama_embd: hidden states that go into a call."""

    _fields_ = (("data", ctypes.c_void_p), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t))


HEAD_NAMES = {
    "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
    "llama_get_embeddings_nextn_ith": "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
}
"""What the pinned libraries export under their C++ names alone."""
_SIGNATURES: Signatures = {
    **functions("llama_model_n_layer_nextn", INT, POINTER),
    **functions("llama_get_embeddings_nextn", POINTER, POINTER),
    **functions("llama_get_embeddings_nextn_ith", POINTER, POINTER, INT),
    **functions("llama_set_embeddings_nextn", None, POINTER, BOOL, BOOL),
    **functions("llama_batch_ext_init", POINTER, POINTER),
    **functions("llama_batch_ext_free llama_batch_ext_clear", None, POINTER),
    **functions("llama_batch_ext_add_token", INT, POINTER, INT, INT),
    **functions(
        "llama_batch_ext_set_embd_state llama_batch_ext_set_embd_token", BOOL, POINTER, INT, Embedding
    ),
    **functions("llama_batch_ext_set_pos", BOOL, POINTER, INT, POINTER),
    **functions("llama_batch_ext_set_output_logits", BOOL, POINTER, INT, BOOL),
    **functions("llama_process", INT, POINTER, ENUM, POINTER),
}
HEAD_CONTEXT = 1
"""LLAMA_CONTEXT_TYPE_MTP"""
_DECODE = 1
"""LLAMA_PROCESS_TYPE_DECODE"""
MAX_STATES_BYTES = 256 << 20
"""of hidden states that are kept for a sequence: those of the oldest tokens go first"""


@dataclass(slots=True)
class _Known:
    first: int = 0
    states: list[State] = field(default_factory=list)


def num_heads(library: Library, model: int) -> int:
    """How many layers of a loaded model predict tokens after the next one; 0 too where the library lacks a
    function for them."""
    return int(library.functions.llama_model_n_layer_nextn(model)) if can_run_heads(library) else 0


def can_run_heads(library: Library) -> bool:
    """Whether a library has the functions for models' own heads."""
    try:
        library.declare(_SIGNATURES)
    except LibraryRefused:
        return False
    return True


class HiddenStates:
    """The hidden states of the tokens that a context's sequences store, as far as they were kept."""

    def __init__(self, library: Library, context: int, model: int) -> None:
        self._native, self._context = library.functions, context
        self._native.llama_set_embeddings_nextn(context, True, False)
        self.width = width = int(self._native.llama_model_n_embd(model))
        self.none: State = np.zeros(width, dtype=np.float32)
        self._known: dict[int, _Known] = {}
        self._most = max(MAX_STATES_BYTES // (4 * width), 2)

    def after_call(self, spans: Sequence[Span]) -> None:
        """A call was made over these spans."""
        count = sum(len(span.tokens) for span in spans)
        address = self._native.llama_get_embeddings_nextn(self._context)
        rows, start = _floats(address, count * self.width).reshape(count, self.width), 0
        for span in spans:
            known = self._known.setdefault(span.sequence, _Known(span.start))
            if known.first + len(known.states) != span.start:  # what came before was not kept
                known.first, known.states = span.start, []
            known.states += list(rows[start : start + len(span.tokens)].copy())
            start += len(span.tokens)
            if (excess := len(known.states) - self._most) > 0:
                del known.states[:excess]
                known.first += excess

    def truncate(self, sequence: int, length: int) -> None:
        """The sequence stores only so many tokens now."""
        if known := self._known.get(sequence):
            del known.states[max(length - known.first, 0) :]

    def copy(self, source: int, sequence: int, length: int) -> None:
        """A sequence took over the first `length` tokens of another."""
        known = self._known.get(source, _Known())
        self._known[sequence] = _Known(known.first, known.states[: max(length - known.first, 0)])

    def restored(self, sequence: int, length: int) -> None:
        """The sequence holds so many tokens that were evaluated at another time."""
        self._known[sequence] = _Known(length)

    def before(self, sequence: int, position: int) -> State | None:
        """That of the token before a position, zero where there is none or it was not kept; None for a token
        that the target has not evaluated."""
        known = self._known.get(sequence, _Known())
        index = position - 1 - known.first
        if index >= len(known.states):
            return None
        return known.states[index] if index >= 0 else self.none

    def knows_any(self, sequence: int) -> bool:
        """Whether any of a sequence's are known."""
        return bool(self._known.get(sequence, _Known()).states)


class HeadBatch:
    """The native batch of a head's calls: tokens, each with the hidden state before it."""

    def __init__(self, library: Library, context: int, width: int) -> None:
        self._native = library.functions
        self._context, self._width = context, width
        self._batch = self._native.llama_batch_ext_init(context)

    def evaluate(self, spans: Sequence[Span], states: Sequence[Sequence[State]]) -> int:
        """Make a call over these spans; returns the library's status. `states` are each span's, one before
        each of its tokens."""
        native, batch, index = self._native, self._batch, 0
        native.llama_batch_ext_clear(batch)
        for span, before in zip(spans, states, strict=True):
            for i, (token, state) in enumerate(zip(span.tokens, before, strict=True)):
                native.llama_batch_ext_add_token(batch, span.sequence, token)
                embedding = Embedding(state.ctypes.data, 1, self._width)
                # Since 2026-10 a state is set apart from a token's embedding; before, that call refuses.
                if not native.llama_batch_ext_set_embd_state(batch, index, embedding):
                    native.llama_batch_ext_set_embd_token(batch, index, embedding)
                position = ctypes.c_int32(span.start + i)
                native.llama_batch_ext_set_pos(batch, index, ctypes.byref(position))
                wanted = i >= len(span.tokens) - span.rows
                native.llama_batch_ext_set_output_logits(batch, index, wanted)
                index += 1
        return int(native.llama_process(self._context, _DECODE, batch))

    def state(self, index: int) -> State:
        """The head's own hidden state of the call's token of this index, which must have had a row."""
        address = self._native.llama_get_embeddings_nextn_ith(self._context, index)
        return _floats(address, self._width).copy()

    def close(self) -> None:
        """Free the batch. Closing twice is harmless."""
        batch, self._batch = self._batch, None
        if batch:
            self._native.llama_batch_ext_free(batch)


def _floats(address: int, count: int) -> State:
    values: Any = (ctypes.c_float * count).from_address(address)
    return np.ctypeslib.as_array(values)


class HeadStates:
    """What a head reads its tokens with, and how much of what it stores it read with the target's states."""

    def __init__(self, target: HiddenStates) -> None:
        self._target = target
        self._own: dict[int, tuple[int, State]] = {}
        """of each sequence's last token, and its position"""
        self._read: dict[int, int] = {}
        """tokens of each sequence that were read with the target's states"""

    def known_part(self, span: Span) -> Span | None:
        """The first tokens of a span that can be read at once, without the last where it has a row; None for
        none."""
        count = len(span.tokens) - span.rows
        if self._target.knows_any(span.sequence):  # else a call without a text is being measured
            known = (self._target.before(span.sequence, span.start + i) is not None for i in range(count))
            count = sum(takewhile(bool, known))
        return replace(span, tokens=span.tokens[:count], rows=0) if count else None

    def before(self, span: Span) -> list[State]:
        """The state before each token of such a part, or of a single one."""
        states = [self._target.before(span.sequence, span.start + i) for i in range(len(span.tokens))]
        at, own = self._own.get(span.sequence, (-1, self._target.none))
        instead = own if at == span.start - 1 else self._target.none
        return [instead if state is None else state for state in states]

    def after_call(self, span: Span, own: State | None) -> None:
        """The tokens of such a part were read; `own` is the head's state of the last."""
        read, end = self._read.get(span.sequence, 0), span.start + len(span.tokens)
        if read >= span.start:  # after a failed call it may have been more
            with_targets = self._target.before(span.sequence, span.start) is not None
            self._read[span.sequence] = end if with_targets else span.start
        if own is not None:
            self._own[span.sequence] = (end - 1, own)

    def truncate(self, sequence: int, length: int) -> None:
        """The sequence stores only so many tokens now."""
        self._read[sequence] = min(self._read.get(sequence, 0), length)

    def restored(self, sequence: int, length: int) -> None:
        """The sequence holds so many tokens that were read at another time."""
        self._read[sequence] = length

    def reach(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens need not be read again, now that more states are known."""
        return min(length, self._read.get(sequence, 0))
