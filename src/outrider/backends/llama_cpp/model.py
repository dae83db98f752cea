"""Weights and contexts of llama.cpp behind the Model contract."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.llama_cpp.library import clear_log, last_error, lib
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

_NO_KV_SLOT = 1


class Weights:
    """A model's weights and vocabulary. Contexts are opened on it; close it after them.

    Raises ModelFileError when llama.cpp cannot run the file, OutOfMemory when it has no room.
    """

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path = path
        self.options = options or LoadOptions()
        self._handle = _load(path, self.options)
        self.name = self.metadata("general.name") or path.stem
        self.vocabulary = LlamaCppVocabulary(
            lib.llama_model_get_vocab(self._handle), self.metadata("tokenizer.ggml.pre")
        )
        self.trained_context: int = lib.llama_model_n_ctx_train(self._handle)
        self.rewind = self._rewind_kind()
        if not lib.llama_model_has_decoder(self._handle) or lib.llama_model_has_encoder(self._handle):
            self.close()
            raise ModelFileError(
                str(path), "it is not a decoder-only language model", "Choose a text-generation model."
            )

    def _rewind_kind(self) -> RewindKind:
        if lib.llama_model_is_recurrent(self._handle) or lib.llama_model_is_hybrid(self._handle):
            return "none"
        if lib.llama_model_n_swa(self._handle) > 0 and not self.options.full_window:
            return "window"
        return "free"

    @property
    def handle(self) -> Any:
        """The native model. Raises BackendError when it was closed."""
        if self._handle is None:
            raise BackendError(str(self.path), "the model was closed", "Load it again.")
        return self._handle

    @property
    def window_tokens(self) -> int:
        """Positions that a sliding-window layer looks back; 0 where there is none."""
        return int(lib.llama_model_n_swa(self.handle))

    def metadata(self, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = lib.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = length + 1

    def open(self, context_length: int = 0, *, max_sequences: int = 1) -> LlamaCppModel:
        """A context of `context_length` tokens for each of `max_sequences` (0: as trained)."""
        return LlamaCppModel(self, context_length or self.trained_context, max_sequences)

    def close(self) -> None:
        """Free the weights. Closing twice is harmless."""
        if self._handle is not None:
            lib.llama_model_free(self._handle)
            self._handle = None


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
    handle = lib.llama_model_load_from_file(str(path).encode(), params)
    if handle:
        return handle
    reason = last_error("llama.cpp could not load it")
    if "alloc" in reason or "memory" in reason:
        raise OutOfMemory(str(path), reason, "Choose a smaller quantization, or offload fewer layers (-ngl).")
    raise ModelFileError(str(path), reason, "Choose a model that this build of llama.cpp supports.")


class LlamaCppModel:
    """A context on some weights: KV state for `max_sequences` sequences of `context_length` tokens.

    Raises OutOfMemory when the KV cache does not fit.
    """

    def __init__(self, weights: Weights, context_length: int, max_sequences: int) -> None:
        self.weights = weights
        self.name = weights.name
        self.vocabulary = weights.vocabulary
        self.rewind: RewindKind = weights.rewind
        self.max_sequences = max_sequences
        if context_length < 2 or max_sequences < 1:
            raise SettingError("context size", f"{context_length} tokens are too few", "Give 2 or more (-c).")
        self._context = _open_context(weights, context_length, max_sequences)
        self._memory = lib.llama_get_memory(self._context)
        self.context_length: int = lib.llama_n_ctx(self._context) // max_sequences
        self.max_batch_tokens: int = lib.llama_n_batch(self._context)
        self.threads: int = lib.llama_n_threads(self._context)
        self.threads_batch: int = lib.llama_n_threads_batch(self._context)
        self._lengths = [0] * max_sequences
        self._batch = _Batch(self.max_batch_tokens)

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        if sum(span.rows for span in spans) > self.weights.options.max_rows:
            raise BackendError(
                "span", f"a call gives at most {self.weights.options.max_rows} rows", "Raise max_rows."
            )
        num_tokens = self._batch.fill(spans, self._lengths)
        status = lib.llama_decode(self._live_context, self._batch.native(num_tokens))
        if status != 0:
            self._undo(spans)
            raise self._failure(status, num_tokens)
        for span in spans:
            self._lengths[span.sequence] += len(span.tokens)
        return self._rows(spans)

    def _rows(self, spans: Sequence[Span]) -> list[Logits]:
        """Views of the library's own buffer, which holds the wanted rows in batch order."""
        num_rows = sum(span.rows for span in spans)
        size = self.vocabulary.size
        if num_rows:
            pointer = lib.llama_get_logits(self._context)
            address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
            values = (ctypes.c_float * (num_rows * size)).from_address(address)
            buffer = np.ctypeslib.as_array(values).reshape(num_rows, size)
        else:
            lib.llama_synchronize(self._context)
            buffer = np.empty((0, size), dtype=np.float32)
        rows, start = [], 0
        for span in spans:
            rows.append(buffer[start : start + span.rows])
            start += span.rows
        return rows

    def _undo(self, spans: Sequence[Span]) -> None:
        """A failed call may have stored some of its micro-batches."""
        for span in spans:
            if not lib.llama_memory_seq_rm(self._memory, span.sequence, span.start, -1):
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
        return self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        if length >= self._lengths[sequence]:
            return
        if length > 0:
            self._check_rewind(sequence, length)
        if not lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RewindUnsupported(self.name, f"llama.cpp refuses to forget back to {length} tokens")
        self._lengths[sequence] = length

    def _check_rewind(self, sequence: int, length: int) -> None:
        """llama.cpp reports success for sliding windows even where needed cells are gone."""
        if self.rewind == "none":
            raise RewindUnsupported(self.name, "a recurrent state cannot forget single tokens")
        if self.rewind == "window":
            oldest = lib.llama_memory_seq_pos_min(self._memory, sequence)
            if oldest > max(0, length - self.weights.window_tokens):
                raise RewindUnsupported(
                    self.name,
                    f"its sliding window no longer holds what {length} tokens need",
                    "Use --swa-full.",
                )

    @property
    def _live_context(self) -> Any:
        if self._context is None:
            raise BackendError(self.name, "the model was closed", "Load it again.")
        return self._context

    def close(self) -> None:
        if self._context is not None:
            lib.llama_free(self._context)
            self._context = None


def _open_context(weights: Weights, context_length: int, max_sequences: int) -> Any:
    options = weights.options
    params = lib.llama_context_default_params()
    params.n_ctx = context_length * max_sequences
    params.n_seq_max = max_sequences
    params.kv_unified = True  # else sequences with drafts of different length share no call
    params.n_batch = max(options.batch_tokens, options.max_rows)
    params.n_ubatch = min(options.micro_batch_tokens, params.n_batch)
    params.n_outputs_max = options.max_rows
    params.n_threads = options.threads or physical_cores()
    params.n_threads_batch = options.threads_batch or options.threads or physical_cores()
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    params.type_k = CONTEXT_TYPES[options.cache_type_k]
    params.type_v = CONTEXT_TYPES[options.cache_type_v]
    params.swa_full = options.full_window
    clear_log()
    context = lib.llama_init_from_model(weights.handle, params)
    if not context:
        raise OutOfMemory(
            f"{weights.name} with a context of {context_length} tokens",
            last_error("llama.cpp could not create it"),
            "Give a smaller context (-c, -cd) or a smaller cache type (-ctk, -ctv).",
        )
    return context


class _Batch:
    """The arrays of a llama_batch, allocated once and refilled for every call."""

    def __init__(self, size: int) -> None:
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._sequence = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._num_sequences = np.ones(size, dtype=np.int32)
        # One sequence per token: each entry points at its own element of `_sequence`.
        self._sequences = self._sequence.ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        self._native = lib.llama_batch(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._num_sequences, ctypes.c_int32),
            seq_id=_pointer(self._sequences, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, spans: Sequence[Span], lengths: Sequence[int]) -> int:
        """Lay the spans out one after another; returns the number of tokens."""
        start = 0
        for span in spans:
            if span.start != lengths[span.sequence]:
                raise BackendError(
                    "span", f"it starts at {span.start}, but {lengths[span.sequence]} tokens are stored"
                )
            end = start + len(span.tokens)
            if end > len(self._token):
                raise BackendError("span", f"a call takes at most {len(self._token)} tokens")
            self._token[start:end] = span.tokens
            self._position[start:end] = range(span.start, span.start + len(span.tokens))
            self._sequence[start:end] = span.sequence
            self._wanted[start:end] = 0
            self._wanted[end - span.rows : end] = 1
            start = end
        return start

    def native(self, num_tokens: int) -> Any:
        """The llama_batch over the first `num_tokens` entries."""
        self._native.n_tokens = num_tokens
        return self._native


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
