"""Heads: layers that predict a target's tokens after the next one from its hidden states.

A head reads a token together with the target's hidden state of the position before it, and gives logits and a
hidden state of its own: what is committed it reads with the target's states, what it drafts with its own. MTP
layers read the target's last state (DeepSeek-V3 technical report, 2024, section 2.2). An EAGLE-3 head reads
one that it makes of what goes into three of the target's layers (Li et al., EAGLE-3, 2025). A DFlash drafter
stores what goes into some layers as its own KV, and drafts a block of tokens in one call over masks."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.backends.gguf.c_types import CLibrary, LibraryRefused, functions, structure
from outrider.core.data import Span
from outrider.core.errors import BackendError
from outrider.models.heads import CHAINED

State = npt.NDArray[np.float32]
"""The hidden state of one position, or several of them side by side, shape (width,)."""


_Embedding = structure("llama_embd", "ptr data\nsize n_rows n_embd")

HEAD_NAMES = {
    "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
    "llama_get_embeddings_nextn_ith": "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "llama_set_nextn_layer_offset": "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
    "llama_get_embeddings_layer_inp": "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "llama_set_embeddings_layer_inp": "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
}
"""What the pinned libraries export under their C++ names alone."""
_SIGNATURES = functions(
    """
    i32 llama_model_n_layer_nextn llama_model_n_embd_out (ptr)
    ptr llama_get_embeddings_nextn (ptr)
    ptr llama_get_embeddings_nextn_ith (ptr i32)
    void llama_set_embeddings_nextn (ptr bool bool)
    void llama_set_nextn_layer_offset (ptr i32)
    ptr llama_batch_ext_init (ptr)
    void llama_batch_ext_free llama_batch_ext_clear (ptr)
    i32 llama_batch_ext_add_token (ptr i32 i32)
    bool llama_batch_ext_set_embd_state llama_batch_ext_set_embd_token (ptr i32 embd)
    bool llama_batch_ext_set_pos (ptr i32 ptr)
    bool llama_batch_ext_set_output_logits (ptr i32 bool)
    i32 llama_process (ptr enum ptr)
    """,
    embd=_Embedding,
)
_LAYER_SIGNATURES = functions(
    """
    void llama_set_embeddings_layer_inp (ptr u32 bool)
    ptr llama_get_embeddings_layer_inp (ptr u32)
    i32 llama_batch_ext_add_embd (ptr i32 embd)
    i32 llama_memory_seq_pos_max (ptr i32)
    void llama_set_causal_attn (ptr bool)
    i32 llama_vocab_mask (ptr)
    """,
    embd=_Embedding,
)
"""What those need besides that read inputs of layers."""
_ENCODE, _DECODE = 0, 1
"""llama_process_type"""
MAX_STATES_BYTES = 256 << 20
"""of hidden states that are kept for a sequence: those of the oldest tokens go first"""


@dataclass(slots=True)
class _Known:
    first: int = 0
    states: list[State] = field(default_factory=list)


def num_heads(library: CLibrary, model: int, architecture: str) -> int:
    """How many layers of a loaded model predict tokens after the next one, and can be run by the library."""
    if why_no_heads(library):
        return 0
    count = int(library.functions.llama_model_n_layer_nextn(model))
    return count if count < 2 or architecture in CHAINED else 0


def why_no_heads(library: CLibrary, *, of_layers: bool = False) -> str:
    """What a library lacks to run heads, or those that read inputs of layers; empty where it has all."""
    try:
        library.declare({**_SIGNATURES, **(_LAYER_SIGNATURES if of_layers else {})})
    except LibraryRefused as refusal:
        return str(refusal)
    return ""


class HiddenStates:
    """The hidden states of the tokens that a context's sequences store, as far as they were kept: those of
    the model's end, or what goes into each of `layers` (the number of all: what comes out of the last)."""

    def __init__(self, library: CLibrary, context: int, model: int, layers: Sequence[int] = ()) -> None:
        if lacks := why_no_heads(library, of_layers=bool(layers)):
            raise BackendError(library.title, f"it cannot run heads: {lacks}")
        self._native = native = library.functions
        self.layers = tuple(layers)
        num_layers = native.llama_model_n_layer(model)
        end = partial(native.llama_get_embeddings_nextn, context)
        for layer in layers:
            if layer < num_layers:
                native.llama_set_embeddings_layer_inp(context, layer, True)
        if not layers or max(layers) == num_layers:
            native.llama_set_embeddings_nextn(context, True, False)
        self._outputs = [
            partial(native.llama_get_embeddings_layer_inp, context, layer) if layer < num_layers else end
            for layer in layers
        ] or [end]
        self._part = int(native.llama_model_n_embd(model))
        self.width = width = self._part * len(self._outputs)
        self.none: State = np.zeros(width, dtype=np.float32)
        self._known: dict[int, _Known] = {}
        self._most = max(MAX_STATES_BYTES // (4 * width), 2)

    def after_call(self, spans: Sequence[Span]) -> None:
        count, start = sum(len(span.tokens) for span in spans), 0
        found = [_floats(get(), count * self._part).reshape(count, self._part) for get in self._outputs]
        rows = np.concatenate(found, axis=1)
        for span in spans:
            known = self._known.setdefault(span.sequence, _Known(span.start))
            if known.first + len(known.states) != span.start:  # what came before was not kept
                known.first, known.states = span.start, []
            known.states += list(rows[start : start + len(span.tokens)])
            start += len(span.tokens)
            if (excess := len(known.states) - self._most) > 0:
                del known.states[:excess]
                known.first += excess

    def truncate(self, sequence: int, length: int) -> None:
        if known := self._known.get(sequence):
            del known.states[max(length - known.first, 0) :]

    def copy(self, source: int, sequence: int, length: int) -> None:
        known = self._known.get(source, _Known())
        self._known[sequence] = _Known(known.first, known.states[: max(length - known.first, 0)])

    def restored(self, sequence: int, length: int) -> None:
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
        return bool(self._known.get(sequence, _Known()).states)


class Entry(NamedTuple):
    """A place in a call of a head: a token, a state (before the token, where there are both), and whether it
    gives a row."""

    sequence: int
    position: int
    token: int | None
    state: State | None
    wanted: bool = False


class HeadBatch:
    """The native batch of a head's calls, whose states have `width` values."""

    def __init__(self, library: CLibrary, context: int, width: int) -> None:
        self._native = library.functions
        self._context, self._width = context, width
        self._batch = self._native.llama_batch_ext_init(context)
        weakref.finalize(self, self._native.llama_batch_ext_free, self._batch).atexit = False

    def evaluate(self, entries: Iterable[Entry]) -> int:
        native, batch, size = self._native, self._batch, 0
        native.llama_batch_ext_clear(batch)
        for index, (sequence, position, token, state, wanted) in enumerate(entries):
            if token is not None:
                native.llama_batch_ext_add_token(batch, sequence, token)
            elif state is not None:
                native.llama_batch_ext_add_embd(batch, sequence, _embedding(state))
            # Since 2026-10 a state is set apart from a token's embedding; before, that call refuses.
            if (
                token is not None
                and state is not None
                and not native.llama_batch_ext_set_embd_state(batch, index, _embedding(state))
            ):
                native.llama_batch_ext_set_embd_token(batch, index, _embedding(state))
            # States of models with rotation in sections have a position for each of four.
            native.llama_batch_ext_set_pos(batch, index, (ctypes.c_int32 * 4)(position, position, position))
            native.llama_batch_ext_set_output_logits(batch, index, wanted)
            size += 1
        return int(native.llama_process(self._context, _DECODE, batch)) if size else 0

    def encode(self, states: Sequence[State], memory: int) -> list[State]:
        """The states that an EAGLE-3 head reads, made of its target's. Raises LibraryRefused."""
        native, batch = self._native, self._batch
        native.llama_batch_ext_clear(batch)
        # It stores nothing, but its positions must be those that come next.
        start = native.llama_memory_seq_pos_max(memory, 0) + 1
        for i, state in enumerate(states):
            native.llama_batch_ext_add_embd(batch, 0, _embedding(state))
            native.llama_batch_ext_set_pos(batch, i, ctypes.byref(ctypes.c_int32(start + i)))
            native.llama_batch_ext_set_output_logits(batch, i, True)
        if status := native.llama_process(self._context, _ENCODE, batch):
            raise LibraryRefused(f"it could not read the target's states (status {status})")
        return list(self.states(len(states)).copy())

    def state(self, index: int) -> State:
        address = self._native.llama_get_embeddings_nextn_ith(self._context, index)
        return _floats(address, self._width).copy()

    def states(self, count: int) -> State:
        """Views of the `count` states of the last call, shape (count, width)."""
        address = self._native.llama_get_embeddings_nextn(self._context)
        return _floats(address, count * self._width).reshape(count, self._width)


def _embedding(state: State) -> ctypes.Structure:
    """Points at the state, which must outlive it."""
    return _Embedding(state.ctypes.data, 1, len(state))


def _floats(address: int, count: int) -> State:
    values: Any = (ctypes.c_float * count).from_address(address)
    return np.ctypeslib.as_array(values)
