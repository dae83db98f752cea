"""llama.cpp as it is since 2026-09 (llama-cpp-python 0.3.36, xllamacpp 2026.10): what it alone declares."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.gguf.c_types import (
    BOOL,
    ENUM,
    FLOAT,
    INT,
    POINTER,
    SIZE,
    TEXT,
    UINT,
    LibraryRefused,
    fields,
    functions,
    structure,
)
from outrider.backends.gguf.devices import Places, device_array
from outrider.backends.gguf.heads import HEAD_NAMES
from outrider.backends.gguf.library import BATCH_FIELDS, Library
from outrider.backends.gguf.log import ERROR_LEVEL, silenced
from outrider.backends.gguf.options import CONTEXT_TYPES, FLASH_ATTENTION, SPLIT_MODES, LoadOptions
from outrider.core.saved import Bytes

_PARTIAL_STATE = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent states, and what of a window is kept"""
_LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""llama_load_mode by whether files are mapped and locked in memory."""

_ModelParams = structure(
    "llama_model_params",
    fields(POINTER, "devices", "tensor_buft_overrides"),
    fields(INT, n_gpu_layers=-1),
    fields(ENUM, split_mode=1, load_mode=-1, lazy_mode=1),
    fields(INT, "main_gpu"),
    fields(POINTER, "tensor_split", "progress_callback", "progress_callback_user_data", "kv_overrides"),
    fields(BOOL, "vocab_only", "check_tensors", use_extra_bufts=True),
    fields(BOOL, "no_host", "no_alloc", "load_mtp"),
)

_CONTEXT_FIRST = [
    *fields(UINT, n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1),
    *fields(UINT, "n_rs_seq", "n_outputs_max", n_outputs_max_per_seq=1),
    *fields(INT, n_threads=4, n_threads_batch=4),
    *fields(ENUM, "ctx_type", rope_scaling_type=-1, pooling_type=-1, attention_type=-1, flash_attn_type=-1),
    *fields(FLOAT, "rope_freq_base", "rope_freq_scale", yarn_ext_factor=-1.0, yarn_attn_factor=-1.0),
    *fields(FLOAT, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0),
    *fields(UINT, "yarn_orig_ctx"),
    *fields(FLOAT, defrag_thold=-1.0),
    *fields(POINTER, "cb_eval", "cb_eval_user_data"),
    *fields(ENUM, type_k=1, type_v=1),
]
_CONTEXT_LAST = [
    *fields(POINTER, "abort_callback", "abort_callback_data"),
    *fields(BOOL, "embeddings", offload_kqv=True, no_perf=True, op_offload=True, swa_full=True),
    *fields(BOOL, "kv_unified"),
    *fields(POINTER, "samplers"),
    *fields(SIZE, "n_samplers"),
    *fields(POINTER, "ctx_other"),
]
_ContextParams = (
    structure("llama_context_params", _CONTEXT_FIRST, _CONTEXT_LAST),  # llama-cpp-python 0.3.36
    structure(  # xllamacpp 2026.10
        "llama_context_params", _CONTEXT_FIRST, fields(SIZE, "moe_cache_size"), _CONTEXT_LAST
    ),
)

_QuantizeParams = structure(
    "llama_model_quantize_params",
    fields(INT, "nthread"),
    fields(ENUM, ftype=7, output_tensor_type=43, token_embedding_type=43),
    fields(BOOL, "allow_requantize", quantize_output_tensor=True),
    fields(BOOL, "only_copy", "pure", "keep_split", "dry_run"),
    fields(POINTER, "imatrix", "kv_overrides", "tt_overrides", "prune_layers"),
    fields(SIZE, max_buf_size=8 * 2**30),
)


_FIT = {
    "common_fit_params": "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32"
    "llama_model_tensor_buft_overridePmjPK22common_fit_extra_model14ggml_log_level"
}
"""What some builds export under its C++ name alone."""


class Dialect(Library):
    """llama.cpp of ggml-org."""

    backend = "llama.cpp"
    ModelParams, ContextParams, QuantizeParams = _ModelParams, _ContextParams, _QuantizeParams
    Batch = structure("llama_batch", BATCH_FIELDS)
    keeps_windows = True
    reuses_window_cells = True
    keeps_states = True
    flash_mixes_sequences = False
    split_modes = SPLIT_MODES
    names = {**HEAD_NAMES, **_FIT}  # noqa: RUF012
    signatures = {  # noqa: RUF012
        **functions("llama_adapter_get_alora_n_invocation_tokens", ctypes.c_uint64, POINTER),
        **functions("llama_set_adapters_lora", INT, POINTER, POINTER, SIZE, POINTER),
        **functions("llama_get_memory", POINTER, POINTER),
        **functions("llama_model_is_diffusion", BOOL, POINTER),
        **functions("llama_model_n_swa", INT, POINTER),
        **functions("llama_n_rs_seq", UINT, POINTER),
        **functions("llama_state_seq_get_size", SIZE, POINTER, INT),
        **functions("llama_state_seq_get_size_ext", SIZE, POINTER, INT, UINT),
        **functions("llama_state_seq_get_data llama_state_seq_set_data", SIZE, POINTER, POINTER, SIZE, INT),
        **functions(
            "llama_state_seq_get_data_ext llama_state_seq_set_data_ext",
            SIZE,
            POINTER,
            POINTER,
            SIZE,
            INT,
            UINT,
        ),
        **functions("llama_vocab_get_attr", ENUM, POINTER, INT),
    }

    def _set_model_params(self, params: Any, options: LoadOptions) -> None:
        params.load_mode = _LOAD_MODES[options.mmap, options.mlock]
        params.use_extra_bufts = options.extra_buffer_types
        if options.devices:
            params.devices = ctypes.addressof(device_array(self, options.devices))
        params.load_mtp = options.heads

    def _set_context_params(self, params: Any, options: LoadOptions, max_sequences: int) -> None:
        params.kv_unified = True  # else sequences with drafts of different length share no call
        # The library aborts where more rows are asked for, or more sequences than this.
        params.n_outputs_max = params.n_outputs_max_per_seq = max(options.max_rows, max_sequences)
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        params.swa_full = options.full_window
        params.op_offload = options.op_offload

    def fit(self, path: Path, options: LoadOptions, tokens: int, spare_bytes: int) -> LoadOptions | None:
        pointers = [POINTER] * 5  # parameters of the model and the context, shares, overrides, bytes to leave
        try:
            self.declare({"common_fit_params": (ENUM, TEXT, *pointers, UINT, POINTER, ENUM)})
            places = Places(self)
        except LibraryRefused:
            return None
        model, context = self._model_params(options), self._new_context_params()
        context.n_ctx, context.n_ubatch = tokens, options.micro_batch_tokens
        context.type_k, context.type_v = (
            CONTEXT_TYPES[options.cache_type_k],
            CONTEXT_TYPES[options.cache_type_v],
        )
        context.offload_kqv = options.kv_offload
        self._set_context_params(context, options, 1)
        spare = (SIZE * len(places.shares))(*[spare_bytes] * len(places.shares))
        given = (ctypes.byref(each) for each in (model, context, places.shares, places.overrides, spare))
        with silenced():
            status = self.functions.common_fit_params(os.fsencode(path), *given, tokens, None, ERROR_LEVEL)
        self.take_log()
        if status != 0:
            return None
        return replace(options, gpu_layers=model.n_gpu_layers, **places.decided())

    def samples(self, options: LoadOptions, num_layers: int) -> bool:
        # On a processor, sorting takes longer than the copy.
        return (
            options.backend_sampling and self.uses_gpu(options) and not 0 <= options.gpu_layers <= num_layers
        )

    def needs_invocation(self, adapter: int) -> bool:
        return bool(self.functions.llama_adapter_get_alora_n_invocation_tokens(adapter))

    def use_adapters(self, context: int, adapters: Sequence[tuple[int, float]]) -> bool:
        count = len(adapters)
        pointers = (POINTER * count)(*(adapter for adapter, _ in adapters))
        scales = (FLOAT * count)(*(scale for _, scale in adapters))
        return bool(self.functions.llama_set_adapters_lora(context, pointers, count, scales) == 0)

    def window_tokens(self, model: int) -> int:
        return int(self.functions.llama_model_n_swa(model))

    def snapshots(self, context: int) -> int:
        return int(self.functions.llama_n_rs_seq(context))

    def state_bytes(self, context: int, sequence: int) -> int:
        return int(self.functions.llama_state_seq_get_size_ext(context, sequence, _PARTIAL_STATE))

    def save_state(self, context: int, sequence: int, older: Bytes | None) -> Bytes | None:
        size = self.state_bytes(context, sequence)
        state = older if older is not None and older.size == size else np.empty(size, dtype=np.uint8)
        copied = self.functions.llama_state_seq_get_data_ext(
            context, state.ctypes.data, size, sequence, _PARTIAL_STATE
        )
        return state if size and copied == size else None

    def restore_state(self, context: int, sequence: int, state: Bytes) -> bool:
        read = self.functions.llama_state_seq_set_data_ext(
            context, state.ctypes.data, state.nbytes, sequence, _PARTIAL_STATE
        )
        return bool(read == state.nbytes)

    def is_diffusion(self, model: int) -> bool:
        return bool(self.functions.llama_model_is_diffusion(model))

    def memory(self, context: int) -> int:
        memory: int = self.functions.llama_get_memory(context)
        return memory

    def token_attributes(self, model: int, vocab: int, token: int) -> int:  # noqa: ARG002
        return int(self.functions.llama_vocab_get_attr(vocab, token))
