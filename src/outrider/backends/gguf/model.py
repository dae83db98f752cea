"""The weights of a GGUF file in a native library, and the contexts on them: each is a Model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np

from outrider.backends.gguf.context import (
    LlamaBatch,
    choose_attention,
    clear_log,
    copy_in,
    copy_out,
    last_error,
    load_adapters,
    open_context,
    use_adapters,
)
from outrider.backends.gguf.heads import HiddenStates, num_heads
from outrider.backends.gguf.libraries import load_model
from outrider.backends.gguf.library import Handle
from outrider.backends.gguf.options import LoadOptions
from outrider.backends.gguf.rewinding import Checkpoints, Rewinding, Snapshots, find_rewinding
from outrider.backends.gguf.sizes import ModelSizes, read_sizes
from outrider.backends.gguf.vocabulary import GgufVocabulary
from outrider.core.calls import check_copy, check_restore, check_spans
from outrider.core.contracts import UNLIMITED, RewindKind
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, RewindUnsupported
from outrider.core.saved import Extent, SavedState
from outrider.models.reduced import REDUCED_KEYS, read_part

_NO_KV_SLOT = 1


class Weights:
    """A model's weights and vocabulary, on which contexts are opened.

    The library is the one that the options name; under "auto" the first that can load the file.
    Raises ModelFileError when none can run the file, OutOfMemory when there is no room for it, SettingError
    for a library that cannot be used.
    """

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self.library, model = load_model(path, self.options)
        self.native = Handle(str(path), model, self.library.functions.llama_model_free)
        """the owner of the native model; a context keeps it alive"""
        self.contexts: WeakSet[GgufModel] = WeakSet()
        """those that are open"""
        try:
            self.adapters = load_adapters(self.library, model, self.options.adapters)
            if not self._generates_text():
                why = "it is not a decoder-only language model"
                raise ModelFileError(str(path), why, "Choose a text-generation model.")
        except BaseException:
            self.close()
            raise
        # The file says which quantization it is; its own general.name is often left from training.
        self.name = path.stem
        # The library hands out no arrays. It is asked whether there is such a map, the file for the map.
        part_of = read_part(path) if any(map(self.metadata, REDUCED_KEYS)) else None
        pre_tokenizer = self.metadata("tokenizer.ggml.pre")
        self.vocabulary = GgufVocabulary(self.library, self.native, pre_tokenizer, part_of)
        self.trained_context: int = self.library.functions.llama_model_n_ctx_train(self.handle)
        self.window_tokens = self.library.window_tokens(self.handle)
        """positions that a sliding-window layer looks back, its own included; 0 where there is none"""
        self.compared = ""
        """why this library, in a line, where it was chosen among several"""

    def _generates_text(self) -> bool:
        """Models that embed text have a decoder by llama.cpp's reckoning; what they lack is causality."""
        native, model = self.library.functions, self.handle
        is_causal = self.metadata(f"{self.metadata('general.architecture')}.attention.causal") != "false"
        decodes = native.llama_model_has_decoder(model) and not native.llama_model_has_encoder(model)
        return is_causal and decodes and not self.library.is_diffusion(model)

    @cached_property
    def sizes(self) -> ModelSizes:
        """What the file says of the model's size."""
        return read_sizes(self.path)

    @cached_property
    def rewinding(self) -> Rewinding:
        """How contexts are taken back to an earlier token; tried at the first use where that is not known."""
        return find_rewinding(self)

    @property
    def rewind(self) -> RewindKind:
        """Whether contexts can forget their last tokens."""
        return self.rewinding.kind

    @cached_property
    def num_heads(self) -> int:
        """How many of its layers predict tokens after the next one, and can be drafted with here."""
        return num_heads(self.library, self.handle) if self.options.heads else 0

    @property
    def library_line(self) -> str:
        """The library in use, and why it is this one."""
        return self.compared or str(self.library.file)

    @property
    def handle(self) -> int:
        """The native model. Raises BackendError when it was closed."""
        return self.native.pointer

    def metadata(self, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        return self.library.metadata(self.handle, key)

    def open(
        self,
        context_length: int = 0,
        *,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
        options: LoadOptions | None = None,
        rewinding: Rewinding | None = None,
    ) -> GgufModel:
        """A context of `context_length` tokens per sequence (0: as trained), of `capacity_tokens` over all
        sequences (0: as many as each of them may have); `options`: its own, if any; `rewinding`: how it is to
        be taken back, right or not, instead of as these weights' contexts can be."""
        length = context_length or self.trained_context
        rewinding = rewinding or self.rewinding.of(max_sequences)
        return GgufModel(self, length, max_sequences, options, capacity_tokens, rewinding=rewinding)

    def close(self) -> None:
        """Free the weights, and the contexts that are open on them. Closing twice is harmless."""
        for model in list(self.contexts):
            model.close()
        self.native.close()


class GgufModel:
    """A context on some weights: KV state for `max_sequences` sequences of up to `context_length` tokens,
    and of `capacity_tokens` together (0: as many as each of them may have). `beside` lends what they lack.

    Raises OutOfMemory when the KV cache does not fit.
    """

    is_head: ClassVar[bool] = False
    """whether it computes a head rather than a model"""
    context_type: ClassVar[int] = 0

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        max_sequences: int,
        options: LoadOptions | None = None,
        capacity_tokens: int = 0,
        rewinding: Rewinding | None = None,
        beside: GgufModel | None = None,
    ) -> None:
        self.weights = weights
        self.options = options or weights.options
        self.name, self.vocabulary = weights.name, weights.vocabulary
        rewinding = rewinding or weights.rewinding
        self.rewind: RewindKind = rewinding.kind
        self.max_sequences = max_sequences
        capacity = capacity_tokens or context_length * max_sequences
        self._library = weights.library
        attention = choose_attention(weights, self.options, capacity, max_sequences)
        self.flash_attention = attention
        """whether it is in use: "on", "off", or "auto" where that was left to the library"""
        chosen = replace(self.options, flash_attention=attention)
        micro_batch = min(chosen.micro_batch_tokens, max(chosen.batch_tokens, chosen.max_rows))
        snapshots = rewinding.snapshots(chosen.snapshots, max_sequences, micro_batch)
        context = open_context(
            weights, chosen, context_length, max_sequences, capacity, snapshots, self.context_type, beside
        )
        native = self._library.functions
        self._native = Handle(self.name, context, native.llama_free, keeps=weights.native)
        use_adapters(self._library, context, weights.adapters)
        weights.contexts.add(self)
        # Libraries round contexts up; the length that was asked for is the one that holds.
        self.capacity_tokens: int = min(capacity, native.llama_n_ctx(context))
        self.context_length: int = min(context_length, self.capacity_tokens)
        self.attends_to_all: bool = max_sequences > 1 and self._library.flash_mixes_sequences
        self.max_batch_tokens: int = native.llama_n_batch(context)
        self.micro_batch_tokens: int = native.llama_n_ubatch(context)
        self.threads: int = native.llama_n_threads(context)
        self.threads_batch: int = native.llama_n_threads_batch(context)
        self._lengths = [0] * max_sequences
        self.max_rows, self._may_have_gaps = self.options.max_rows, False
        self.max_draft = UNLIMITED
        if self.rewind == "snapshots":
            self.max_draft = self._library.snapshots(context)
            self.rewind = "snapshots" if self.max_draft else "none"
        elif self.rewind == "none":
            self.max_draft = 0
        self._snapshots = Snapshots(self.max_draft)
        self._checkpoints = Checkpoints(self._library)
        self.hidden: HiddenStates | None = None
        """what a head reads, where they are kept"""
        self._batch = LlamaBatch(self._library.Batch, self.max_batch_tokens)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        context = self._native.pointer
        check_spans(self, spans)
        clear_log()
        self._close_gaps(context)
        if self.rewind == "checkpoints":
            self._checkpoints.before_call(context, spans)
        try:
            status = self._evaluate(context, spans)
            if status == _NO_KV_SLOT and self._make_room(context, spans):
                status = self._evaluate(context, spans)
            if status == _NO_KV_SLOT:
                why = f"the KV cache has no room for {sum(len(span.tokens) for span in spans)} more tokens"
                raise OutOfMemory(self.name, why, "Give a larger context (-c).")
            if status != 0:
                why = last_error(f"{self._library.title} failed with status {status}")
                raise BackendError(self.name, why)
            self._snapshots.after_call(spans)
            for span in spans:
                self._lengths[span.sequence] = span.start + len(span.tokens)
            if self.hidden is not None:
                self.hidden.after_call(spans)
        except BaseException:  # Ctrl-C included: it is raised when the native call returns
            self._undo(spans)
            raise
        return self._rows(context, spans)

    def _evaluate(self, context: Any, spans: Sequence[Span]) -> int:
        """Make the call; returns the library's status."""
        return int(self._library.functions.llama_decode(context, self._batch.fill(spans)))

    def keep_hidden_states(self, layers: Sequence[int] = ()) -> HiddenStates:
        """Keep the hidden states of all tokens from now on, for a head: `HiddenStates` of these layers. A
        library that lacks heads raises, one that does not give these inputs ends the process."""
        self.hidden = HiddenStates(self._library, self._native.pointer, self.weights.handle, layers)
        return self.hidden

    def _rows(self, context: Any, spans: Sequence[Span]) -> list[Logits]:
        """Views of the library's own buffer, which holds the wanted rows in batch order."""
        num_rows, size = sum(span.rows for span in spans), self.vocabulary.size
        if num_rows:
            address = self._library.functions.llama_get_logits(context)
            if not address:
                raise BackendError(self.name, "the library gave no logits", "Choose a text-generation model.")
            values = (ctypes.c_float * (num_rows * size)).from_address(address)
            buffer = np.ctypeslib.as_array(values).reshape(num_rows, size)
        else:
            self._library.functions.llama_synchronize(context)
            buffer = np.empty((0, size), dtype=np.float32)
        ends = accumulate(span.rows for span in spans)
        return [buffer[end - span.rows : end] for span, end in zip(spans, ends, strict=True)]

    def _close_gaps(self, context: int) -> None:
        """A single sequence is only ever cut at its end; several leave free cells among each other's."""
        if self._may_have_gaps and self.max_sequences > 1 and not self._library.close_gaps(context):
            raise BackendError(self.name, last_error(f"{self._library.title} could not tidy its KV cache"))
        self._may_have_gaps = False

    def _make_room(self, context: int, spans: Sequence[Span]) -> bool:
        """Whether a call that found no room is to be tried again, after what it stored was taken back."""
        self._undo(spans)
        kept = all(self._lengths[span.sequence] == span.start for span in spans)
        return kept and self._library.make_room(context)

    def _undo(self, spans: Sequence[Span]) -> None:
        """A failed call may have stored some of its micro-batches. Where they cannot be taken back,
        or have pushed out what the sequence still needs, the sequence starts again empty."""
        for span in spans:
            # Whether the call changed a recurrent state is not known: only a copy of it is sure.
            self._lengths[span.sequence] = span.start
            removed = self.rewind not in ("snapshots", "none") and self._restored(span.sequence, span.start)
            if not removed or not self._holds_window(span.sequence, span.start):
                self._forget(span.sequence, -1)
                self._lengths[span.sequence] = 0
                self._checkpoints.gone_back(span.sequence, 0)
            if self.hidden is not None:
                self.hidden.truncate(span.sequence, self._lengths[span.sequence])

    @property
    def _memory(self) -> Any:
        """What the functions about the KV cache take. Raises BackendError when it was closed."""
        return self._library.memory(self._native.pointer)

    def _forget(self, sequence: int, start: int) -> bool:
        """Remove a sequence's tokens from position `start` on (-1: all); False where that is impossible."""
        self._may_have_gaps = True
        return bool(self._library.functions.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def length(self, sequence: int) -> int:
        # A negative number means all sequences to the libraries.
        if not 0 <= sequence < self.max_sequences:
            raise BackendError("sequence", f"there is none numbered {sequence}")
        return self._lengths[sequence]

    def _restored(self, sequence: int, start: int) -> bool:
        """Whether a sequence's tokens from position `start` on could be removed."""
        native, kept = self._native.pointer, self._checkpoints
        if start and self.rewind == "checkpoints" and not kept.restore(native, sequence, start, sequence):
            return False
        return self._forget(sequence, start)

    def reach(self, sequence: int, length: int) -> int:
        stored = self.length(sequence)
        if length in (0, stored):
            return length
        if self.rewind == "checkpoints":
            return self._checkpoints.reach(sequence, length)
        if self.rewind == "snapshots":
            return length if stored - length <= self._snapshots.reach(sequence) else 0
        return length if self.rewind != "none" and self._holds_window(sequence, length) else 0

    def truncate(self, sequence: int, length: int) -> None:
        _ = self._native.pointer  # refuses when it was closed
        stored = self.length(sequence)
        if not 0 <= length <= stored:
            raise BackendError("truncate", f"{stored} tokens are stored, so {length} cannot be kept")
        if length == stored:
            return
        if self.reach(sequence, length) != length:
            if self.rewind == "window":
                # llama.cpp reports success even where needed cells are gone.
                why = f"its sliding window no longer holds what {length} tokens need"
                raise RewindUnsupported(self.name, why, "Use --swa-full.")
            raise RewindUnsupported(self.name, f"it has no state of after {length} tokens")
        if not self._restored(sequence, length):
            why = f"{self._library.title} refuses to forget back to {length} tokens"
            raise RewindUnsupported(self.name, why)
        self._lengths[sequence] = length
        self._snapshots.gone_back(sequence, length)
        self._checkpoints.gone_back(sequence, length)
        if self.hidden is not None:
            self.hidden.truncate(sequence, length)

    def _holds_window(self, sequence: int, length: int) -> bool:
        """Whether all that a token at position `length` looks back at is stored."""
        return length == 0 or length >= self._needed(sequence)

    def _needed(self, sequence: int) -> int:
        """The fewest tokens of a sequence that can be kept. There are no gaps in what the library stores, so
        the oldest position in a window is enough to know."""
        if not (self.weights.window_tokens and self._library.reuses_window_cells):
            return 0
        oldest: int = self._library.functions.llama_memory_seq_pos_min(self._memory, sequence)
        return oldest + self.weights.window_tokens - 1 if oldest > 0 else -oldest * UNLIMITED

    def copy(self, source: int, sequence: int, length: int) -> None:
        memory = self._memory
        check_copy(self, source, sequence, length)
        is_whole = length == self._lengths[source] and not self._snapshots.is_past(source)
        kept = self.rewind == "checkpoints" and self._checkpoints.reach(source, length) == length
        can_copy = self.rewind == "free" or kept or (self.rewind in ("snapshots", "checkpoints") and is_whole)
        if not can_copy or not self._holds_window(source, length):
            raise RewindUnsupported(self.name, "it keeps no state of every part of a text")
        # One cache for all sequences: the cells are shared, nothing is moved.
        self._library.functions.llama_memory_seq_cp(memory, source, sequence, 0, length)
        self._snapshots.shared(source)  # both hold one state until the next call
        native = self._native.pointer
        if kept and not is_whole and not self._checkpoints.restore(native, source, length, sequence):
            self._forget(sequence, -1)
            raise RewindUnsupported(self.name, f"{self._library.title} cannot copy its state")
        self._lengths[sequence] = length
        if self.hidden is not None:
            self.hidden.copy(source, sequence, length)

    def save(self, sequence: int) -> SavedState:
        if not (stored := self.length(sequence)):
            raise BackendError("save", f"sequence {sequence} is empty")
        whole = copy_out(self._library, self._native.pointer, sequence, self.name)
        is_cut = self.rewind in ("free", "window")
        window = self._library.reuses_window_cells and self.weights.window_tokens
        # Of a window no more is copied than the next token looks back at.
        cut_from = stored - 1 if 0 < window < stored else 0
        any_from = max(self._needed(sequence), cut_from) if is_cut else stored
        lengths, states = self._checkpoints.saved(sequence)
        return SavedState(Extent(stored, any_from, lengths), (whole, *states))

    def restore(self, sequence: int, state: SavedState) -> None:
        check_restore(self, sequence, state)
        self._may_have_gaps = True
        copy_in(self._library, self._native.pointer, sequence, state.parts[0], self.name)
        self._lengths[sequence] = state.extent.length
        self._snapshots.gone_back(sequence, 0)
        self._checkpoints.restored(sequence, state)
        if self.hidden is not None:
            self.hidden.restored(sequence, state.extent.length)

    @property
    def native_context(self) -> int:
        """The native context. Raises BackendError when it was closed."""
        return self._native.pointer

    def close(self) -> None:
        self._native.close()
