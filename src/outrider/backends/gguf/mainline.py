"""llama.cpp as it is since 2026-09 (llama-cpp-python 0.3.36, xllamacpp 2026.10): what it alone declares."""

from __future__ import annotations

import ctypes
from typing import Any

from outrider.backends.gguf.library import (
    BATCH_FIELDS,
    BOOL,
    INT,
    POINTER,
    TEXT,
    UINT,
    ContextSettings,
    Library,
)
from outrider.backends.gguf.options import CONTEXT_TYPES, FLASH_ATTENTION, LoadOptions

__all__ = ["Mainline"]

ENUM, FLOAT, SIZE = ctypes.c_int, ctypes.c_float, ctypes.c_size_t

_LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""llama_load_mode by whether files are mapped and locked in memory."""


class _ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", POINTER),
        ("tensor_buft_overrides", POINTER),
        ("n_gpu_layers", INT),
        ("split_mode", ENUM),
        ("load_mode", ENUM),
        ("lazy_mode", ENUM),
        ("main_gpu", INT),
        ("tensor_split", POINTER),
        ("progress_callback", POINTER),
        ("progress_callback_user_data", POINTER),
        ("kv_overrides", POINTER),
        ("vocab_only", BOOL),
        ("check_tensors", BOOL),
        ("use_extra_bufts", BOOL),
        ("no_host", BOOL),
        ("no_alloc", BOOL),
        ("load_mtp", BOOL),
    ]


_CONTEXT_NUMBERS: list[tuple[str, Any]] = [
    ("n_ctx", UINT),
    ("n_batch", UINT),
    ("n_ubatch", UINT),
    ("n_seq_max", UINT),
    ("n_rs_seq", UINT),
    ("n_outputs_max", UINT),
    ("n_outputs_max_per_seq", UINT),
    ("n_threads", INT),
    ("n_threads_batch", INT),
    ("ctx_type", ENUM),
    ("rope_scaling_type", ENUM),
    ("pooling_type", ENUM),
    ("attention_type", ENUM),
    ("flash_attn_type", ENUM),
    ("rope_freq_base", FLOAT),
    ("rope_freq_scale", FLOAT),
    ("yarn_ext_factor", FLOAT),
    ("yarn_attn_factor", FLOAT),
    ("yarn_beta_fast", FLOAT),
    ("yarn_beta_slow", FLOAT),
    ("yarn_orig_ctx", UINT),
    ("defrag_thold", FLOAT),
    ("cb_eval", POINTER),
    ("cb_eval_user_data", POINTER),
    ("type_k", ENUM),
    ("type_v", ENUM),
]
_CONTEXT_REST: list[tuple[str, Any]] = [
    ("abort_callback", POINTER),
    ("abort_callback_data", POINTER),
    ("embeddings", BOOL),
    ("offload_kqv", BOOL),
    ("no_perf", BOOL),
    ("op_offload", BOOL),
    ("swa_full", BOOL),
    ("kv_unified", BOOL),
    ("samplers", POINTER),
    ("n_samplers", ctypes.c_size_t),
    ("ctx_other", POINTER),
]


class _ContextParams(ctypes.Structure):
    """As of llama-cpp-python 0.3.36."""

    _fields_ = [*_CONTEXT_NUMBERS, *_CONTEXT_REST]


class _ContextParamsOctober(ctypes.Structure):
    """As of xllamacpp 2026.10."""

    _fields_ = [*_CONTEXT_NUMBERS, ("moe_cache_size", ctypes.c_size_t), *_CONTEXT_REST]


class _Batch(ctypes.Structure):
    _fields_ = BATCH_FIELDS


class Mainline(Library):
    """llama.cpp of ggml-org."""

    backend, title = "llama.cpp", "llama.cpp"
    ModelParams, ContextParams, Batch = _ModelParams, (_ContextParams, _ContextParamsOctober), _Batch
    reuses_window_cells = True
    keeps_windows = True
    flash_mixes_sequences = False
    split_modes = ("none", "layer", "row")
    model_defaults = {  # noqa: RUF012
        "n_gpu_layers": -1,
        "split_mode": 1,
        "load_mode": -1,
        "lazy_mode": 1,
        "use_extra_bufts": True,
    }
    context_defaults = {  # noqa: RUF012
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_outputs_max_per_seq": 1,
        "n_threads": 4,
        "n_threads_batch": 4,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "attention_type": -1,
        "flash_attn_type": -1,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": -1.0,
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
        "defrag_thold": -1.0,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": True,
        "no_perf": True,
        "op_offload": True,
        "swa_full": True,
    }
    signatures = {  # noqa: RUF012
        "llama_get_memory": (POINTER, POINTER),
        "llama_memory_seq_cp": (None, POINTER, INT, INT, INT, INT),
        "llama_memory_seq_pos_min": (INT, POINTER, INT),
        "llama_memory_seq_rm": (BOOL, POINTER, INT, INT, INT),
        "llama_model_free": (None, POINTER),
        "llama_model_is_diffusion": (BOOL, POINTER),
        "llama_model_n_ctx_train": (INT, POINTER),
        "llama_model_n_head": (INT, POINTER),
        "llama_model_n_head_kv": (INT, POINTER),
        "llama_model_n_layer": (INT, POINTER),
        "llama_model_n_swa": (INT, POINTER),
        "llama_state_seq_get_data": (SIZE, POINTER, POINTER, SIZE, INT),
        "llama_state_seq_get_size": (SIZE, POINTER, INT),
        "llama_state_seq_set_data": (SIZE, POINTER, POINTER, SIZE, INT),
        "llama_token_to_piece": (INT, POINTER, INT, TEXT, INT, INT, BOOL),
        "llama_tokenize": (INT, POINTER, TEXT, INT, POINTER, INT, BOOL, BOOL),
        "llama_vocab_get_attr": (ENUM, POINTER, INT),
    }

    def suits(self, options: LoadOptions) -> bool:  # noqa: ARG002 - it can do everything
        return True

    def _set_model_params(self, params: Any, options: LoadOptions) -> None:
        params.split_mode = self.split_mode(options.split_mode)
        params.load_mode = _LOAD_MODES[options.mmap, options.mlock]
        params.use_extra_bufts = options.extra_buffer_types

    def _set_context_params(self, params: Any, settings: ContextSettings) -> None:
        options = settings.options
        params.kv_unified = True  # else sequences with drafts of different length share no call
        # The library aborts where more rows are asked for, or more sequences than this.
        params.n_outputs_max = max(options.max_rows, settings.max_sequences)
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.type_k = CONTEXT_TYPES[options.cache_type_k]
        params.type_v = CONTEXT_TYPES[options.cache_type_v]
        params.swa_full = options.full_window

    def free_model(self, model: int) -> None:
        self.functions.llama_model_free(model)

    def trained_context(self, model: int) -> int:
        return int(self.functions.llama_model_n_ctx_train(model))

    def window_tokens(self, model: int) -> int:
        return int(self.functions.llama_model_n_swa(model))

    def num_layers(self, model: int) -> int:
        return int(self.functions.llama_model_n_layer(model))

    def num_heads(self, model: int) -> int:
        return int(self.functions.llama_model_n_head(model))

    def num_kv_heads(self, model: int) -> int:
        return int(self.functions.llama_model_n_head_kv(model))

    def is_diffusion(self, model: int) -> bool:
        return bool(self.functions.llama_model_is_diffusion(model))

    def _memory(self, context: int) -> int:
        memory: int = self.functions.llama_get_memory(context)
        return memory

    def forget(self, context: int, sequence: int, start: int) -> bool:
        return bool(self.functions.llama_memory_seq_rm(self._memory(context), sequence, start, -1))

    def copy(self, context: int, source: int, sequence: int, length: int) -> None:
        self.functions.llama_memory_seq_cp(self._memory(context), source, sequence, 0, length)

    def oldest_position(self, context: int, sequence: int) -> int:
        return int(self.functions.llama_memory_seq_pos_min(self._memory(context), sequence))

    def make_room(self, context: int) -> bool:  # noqa: ARG002 - it takes any free cells, wherever they lie
        return False

    def token_attributes(self, model: int, vocab: int, token: int) -> int:  # noqa: ARG002
        return int(self.functions.llama_vocab_get_attr(vocab, token))

    def tokenize(self, vocab: int, *arguments: Any) -> int:
        return int(self.functions.llama_tokenize(vocab, *arguments))

    def token_to_piece(self, vocab: int, *arguments: Any) -> int:
        return int(self.functions.llama_token_to_piece(vocab, *arguments))
