"""Weights and contexts of llama.cpp behind the Model contract."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from outrider.backends.llama_cpp.attention import choose_attention
from outrider.backends.llama_cpp.batch import Batch, Limits
from outrider.backends.llama_cpp.handle import Handle
from outrider.backends.llama_cpp.library import clear_log, last_error, lib
from outrider.backends.llama_cpp.memory import check_cache_types, check_room
from outrider.backends.llama_cpp.options import (
    CONTEXT_TYPES,
    FLASH_ATTENTION,
    SPLIT_MODES,
    LoadOptions,
    physical_cores,
)
from outrider.backends.llama_cpp.vocabulary import LlamaCppVocabulary
from outrider.core.contracts import RewindKind
from outrider.core.data import Logits, Span
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, RewindUnsupported, SettingError
from outrider.models.reduced import REDUCED_KEYS, read_part

_NO_KV_SLOT = 1


class Weights:
    """A model's weights and vocabulary, on which contexts are opened.

    Raises ModelFileError when llama.cpp cannot run the file, OutOfMemory when it has no room.
    """

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self._native = Handle(str(path), _load(path, self.options), lib.llama_model_free)
        self._contexts: WeakSet[LlamaCppModel] = WeakSet()
        if not self._generates_text():
            self.close()
            raise ModelFileError(
                str(path), "it is not a decoder-only language model", "Choose a text-generation model."
            )
        # The file says which quantization it is; its own general.name is often left from training.
        self.name = path.stem
        # The library hands out no arrays. It is asked whether there is such a map, the file for the map.
        part_of = read_part(path) if any(map(self.metadata, REDUCED_KEYS)) else None
        self.vocabulary = LlamaCppVocabulary(self._native, self.metadata("tokenizer.ggml.pre"), part_of)
        self.trained_context: int = lib.llama_model_n_ctx_train(self.handle)
        self.window_tokens: int = lib.llama_model_n_swa(self.handle)
        """positions that a sliding-window layer looks back, its own included; 0 where there is none"""
        self.rewind = self._rewind_kind()

    def _generates_text(self) -> bool:
        """Models that embed text have a decoder by llama.cpp's reckoning; what they lack is causality."""
        causal = self.metadata(f"{self.metadata('general.architecture')}.attention.causal") != "false"
        decodes = lib.llama_model_has_decoder(self.handle) and not lib.llama_model_has_encoder(self.handle)
        return causal and decodes and not lib.llama_model_is_diffusion(self.handle)

    def _rewind_kind(self) -> RewindKind:
        if lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle):
            return "none"
        return "window" if self.window_tokens > 0 and not self.options.full_window else "free"

    @property
    def native(self) -> Handle:
        """Who owns the native model; a context keeps it alive."""
        return self._native

    @property
    def handle(self) -> Any:
        """The native model. Raises BackendError when it was closed."""
        return self._native.pointer

    def metadata(self, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = length + 1

    def open(
        self,
        context_length: int = 0,
        *,
        max_sequences: int = 1,
        capacity_tokens: int = 0,
        options: LoadOptions | None = None,
    ) -> LlamaCppModel:
        """A context of `context_length` tokens per sequence (0: as trained), of `capacity_tokens` over all
        sequences (0: as many as each of them may have); `options`: its own, if any."""
        length = context_length or self.trained_context
        model = LlamaCppModel(self, length, max_sequences, options, capacity_tokens)
        self._contexts.add(model)
        return model

    def close(self) -> None:
        """Free the weights, and the contexts that are open on them. Closing twice is harmless."""
        for model in list(self._contexts):
            model.close()
        self._native.close()


def _load(path: Path, options: LoadOptions) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = options.gpu_layers
    params.split_mode = SPLIT_MODES[options.split_mode]
    params.main_gpu = options.main_gpu
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP if options.mmap else lib.LLAMA_LOAD_MODE_NONE
    if options.mlock:
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP_MLOCK if options.mmap else lib.LLAMA_LOAD_MODE_MLOCK
    params.use_extra_bufts = options.extra_buffer_types
    clear_log()
    handle = lib.llama_model_load_from_file(os.fsencode(path), params)
    if handle:
        return handle
    reason = last_error("llama.cpp could not load it").replace("error loading model: ", "")
    if _speaks_of_memory(reason.replace(str(path), "")):
        raise OutOfMemory(str(path), reason, "Choose a smaller quantization, or offload fewer layers (-ngl).")
    raise ModelFileError(
        str(path), reason, "Fetch the file anew, or choose a model that this build of llama.cpp supports."
    )


class LlamaCppModel:
    """A context on some weights: KV state for `max_sequences` sequences of up to `context_length` tokens,
    and of `capacity_tokens` together (0: as many as each of them may have).

    Raises OutOfMemory when the KV cache does not fit.
    """

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        max_sequences: int,
        options: LoadOptions | None = None,
        capacity_tokens: int = 0,
    ) -> None:
        self.weights = weights
        self.options = options or weights.options
        self.name = weights.name
        self.vocabulary = weights.vocabulary
        self.rewind: RewindKind = weights.rewind
        self.max_sequences = max_sequences
        capacity = capacity_tokens or context_length * max_sequences
        attention = choose_attention(weights.handle, self.options, weights.metadata, capacity)
        self.flash_attention = attention
        """whether it is in use: "on", "off", or "auto" where that was left to llama.cpp"""
        chosen = replace(self.options, flash_attention=attention)
        context = _open_context(weights, chosen, context_length, max_sequences, capacity)
        self._native = Handle(self.name, context, lib.llama_free, keeps=weights.native)
        self._memory = lib.llama_get_memory(context)
        # llama.cpp rounds contexts up; the length that was asked for is the one that holds.
        self.capacity_tokens: int = min(capacity, lib.llama_n_ctx(context))
        self.context_length: int = min(context_length, self.capacity_tokens)
        self.max_rows = self.options.max_rows
        self.max_batch_tokens: int = lib.llama_n_batch(context)
        self.micro_batch_tokens: int = lib.llama_n_ubatch(context)
        self.threads: int = lib.llama_n_threads(context)
        self.threads_batch: int = lib.llama_n_threads_batch(context)
        self._lengths = [0] * max_sequences
        self._batch = Batch(
            Limits(self.options.max_rows, self.max_batch_tokens, self.context_length, self.vocabulary.size)
        )

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        context = self._native.pointer
        batch = self._batch.fill(spans, self._lengths)
        clear_log()
        try:
            status = lib.llama_decode(context, batch)
            if status != 0:
                raise self._failure(status, batch.n_tokens)
            for span in spans:
                self._lengths[span.sequence] = span.start + len(span.tokens)
        except BaseException:  # Ctrl-C included: it is raised when the native call returns
            self._undo(spans)
            raise
        return self._rows(context, spans)

    def _rows(self, context: Any, spans: Sequence[Span]) -> list[Logits]:
        """Views of the library's own buffer, which holds the wanted rows in batch order."""
        num_rows = sum(span.rows for span in spans)
        size = self.vocabulary.size
        if num_rows:
            pointer = lib.llama_get_logits(context)
            address = ctypes.cast(pointer, ctypes.c_void_p).value
            if not address:
                raise BackendError(self.name, "llama.cpp gave no logits", "Choose a text-generation model.")
            values = (ctypes.c_float * (num_rows * size)).from_address(address)
            buffer = np.ctypeslib.as_array(values).reshape(num_rows, size)
        else:
            lib.llama_synchronize(context)
            buffer = np.empty((0, size), dtype=np.float32)
        rows, start = [], 0
        for span in spans:
            rows.append(buffer[start : start + span.rows])
            start += span.rows
        return rows

    def _undo(self, spans: Sequence[Span]) -> None:
        """A failed call may have stored some of its micro-batches. Where they cannot be taken back,
        or have pushed out what the sequence still needs, the sequence starts anew."""
        for span in spans:
            self._lengths[span.sequence] = span.start
            removed = lib.llama_memory_seq_rm(self._memory, span.sequence, span.start, -1)
            if not removed or not self._holds_window(span.sequence, span.start):
                lib.llama_memory_seq_rm(self._memory, span.sequence, -1, -1)
                self._lengths[span.sequence] = 0

    def _failure(self, status: int, num_tokens: int) -> BackendError:
        if status == _NO_KV_SLOT:
            return OutOfMemory(
                self.name,
                f"the KV cache has no room for {num_tokens} more tokens",
                "Give a larger context (-c).",
            )
        return BackendError(self.name, last_error(f"llama_decode failed with status {status}"))

    def length(self, sequence: int) -> int:
        self._check_sequence(sequence)
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        _ = self._native.pointer  # refuses when it was closed
        stored = self.length(sequence)
        if not 0 <= length <= stored:
            raise BackendError("truncate", f"{stored} tokens are stored, so {length} cannot be kept")
        if length == stored:
            return
        if length > 0:
            self._check_rewind(sequence, length)
        if not lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RewindUnsupported(self.name, f"llama.cpp refuses to forget back to {length} tokens")
        self._lengths[sequence] = length

    def _check_sequence(self, sequence: int) -> None:
        # A negative number means all sequences to llama.cpp.
        if not 0 <= sequence < self.max_sequences:
            raise BackendError("sequence", f"there is none numbered {sequence}")

    def _check_rewind(self, sequence: int, length: int) -> None:
        """llama.cpp reports success for sliding windows even where needed cells are gone."""
        if self.rewind == "none":
            raise RewindUnsupported(self.name, "a recurrent state cannot forget single tokens")
        if not self._holds_window(sequence, length):
            raise RewindUnsupported(
                self.name,
                f"its sliding window no longer holds what {length} tokens need",
                "Use --swa-full.",
            )

    def _holds_window(self, sequence: int, length: int) -> bool:
        """Whether all that a token at position `length` looks back at is stored. The library keeps
        what it stores of a sequence free of gaps, so the oldest position tells."""
        if self.rewind != "window" or length == 0:
            return True
        oldest: int = lib.llama_memory_seq_pos_min(self._memory, sequence)
        return 0 <= oldest <= max(0, length - self.weights.window_tokens + 1)

    def copy(self, source: int, sequence: int, length: int) -> None:
        _ = self._native.pointer  # refuses when it was closed
        if not 0 < length <= self.length(source):
            raise BackendError("copy", f"sequence {source} does not hold {length} tokens")
        if self.length(sequence):
            raise BackendError("copy", f"sequence {sequence} is not empty")
        if self.rewind != "free":
            raise RewindUnsupported(self.name, "it keeps no state of every part of a text")
        # One cache for all sequences: the cells are shared, nothing is moved.
        lib.llama_memory_seq_cp(self._memory, source, sequence, 0, length)
        self._lengths[sequence] = length

    def close(self) -> None:
        self._native.close()


def _open_context(
    weights: Weights, options: LoadOptions, context_length: int, max_sequences: int, capacity_tokens: int
) -> Any:
    if context_length < 2:
        raise SettingError("context size", f"{context_length} tokens are too few", "Give 2 or more (-c).")
    most = lib.llama_max_parallel_sequences()
    if not 1 <= max_sequences <= most:
        raise SettingError("sequences", f"{max_sequences} cannot be served at once", f"Give 1 to {most}.")
    check_cache_types(weights.handle, options, weights.metadata)
    check_room(
        weights.name,
        weights.handle,
        options,
        weights.metadata,
        context_length=context_length,
        max_sequences=max_sequences,
        capacity_tokens=capacity_tokens,
    )
    context = _init_context(weights, options, max_sequences, capacity_tokens)
    if context:
        return context
    what, reason = f"{weights.name} with a context of {context_length} tokens", last_error("")
    if reason and not _speaks_of_memory(reason):
        raise BackendError(what, reason, "Choose other settings for the context.")
    raise OutOfMemory(
        what,
        reason or "llama.cpp could not create it",
        "Give a smaller context (-c, -cd) or a smaller cache type (-ctk, -ctv).",
    )


def _init_context(weights: Weights, options: LoadOptions, max_sequences: int, capacity_tokens: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = capacity_tokens
    params.n_seq_max = max_sequences
    params.kv_unified = True  # else sequences with drafts of different length share no call
    params.n_batch = max(options.batch_tokens, options.max_rows)
    params.n_ubatch = min(options.micro_batch_tokens, params.n_batch)
    params.n_outputs_max = max(options.max_rows, max_sequences)  # the library aborts below that
    params.n_threads = options.threads or physical_cores()
    params.n_threads_batch = options.threads_batch or options.threads or physical_cores()
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    params.type_k = CONTEXT_TYPES[options.cache_type_k]
    params.type_v = CONTEXT_TYPES[options.cache_type_v]
    params.swa_full = options.full_window
    clear_log()
    return lib.llama_init_from_model(weights.handle, params)


def _speaks_of_memory(reason: str) -> bool:
    return "alloc" in reason or "memory" in reason
