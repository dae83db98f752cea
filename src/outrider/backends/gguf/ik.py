"""ik_llama.cpp (ik-llama-cpp-python 0.1.5): what it alone declares. Its API is that of llama.cpp in 2024,
with parameters of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any

import numpy as np

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
from outrider.backends.gguf.options import CONTEXT_TYPES, UNQUANTIZED, LoadOptions

__all__ = ["Ik"]

ENUM, FLOAT, SIZE = ctypes.c_int, ctypes.c_float, ctypes.c_size_t

_CACHE_TYPES: list[tuple[str, Any]] = [
    *(("type_k_first", ENUM), ("type_k_last", ENUM), ("type_v_first", ENUM), ("type_v_last", ENUM)),
    *(("n_k_first", INT), ("n_k_last", INT), ("n_v_first", INT), ("n_v_last", INT)),
]
"""Other types of the KV cache for the first and last layers."""


class _ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", POINTER),
        ("n_gpu_layers", INT),
        ("mla", INT),
        ("split_mode", ENUM),
        ("main_gpu", INT),
        ("max_gpu", INT),
        ("ncmoe", INT),
        ("type_k", ENUM),
        ("type_v", ENUM),
        ("max_ctx_size", UINT),
        ("n_seq_max", INT),
        ("n_ubatch", INT),
        ("amb", INT),
        ("fit_margin", INT),
        ("fit", BOOL),
        ("worst_graph_tokens", INT),
        *_CACHE_TYPES,
        ("tensor_split", POINTER),
        ("rpc_servers", POINTER),
        ("progress_callback", POINTER),
        ("progress_callback_user_data", POINTER),
        ("kv_overrides", POINTER),
        ("tensor_buft_overrides", POINTER),
        ("vocab_only", BOOL),
        ("use_mmap", BOOL),
        ("use_mlock", BOOL),
        ("check_tensors", BOOL),
        ("repack_tensors", BOOL),
        ("use_thp", BOOL),
        ("validate_quants", BOOL),
        ("merge_qkv", BOOL),
        ("merge_up_gate_exps", BOOL),
        ("mtp", BOOL),
        ("dry_run", BOOL),
        ("flash_attn", BOOL),
    ]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        ("seed", UINT),
        ("n_ctx", UINT),
        ("n_batch", UINT),
        ("n_ubatch", UINT),
        ("n_seq_max", UINT),
        ("n_threads", UINT),
        ("n_threads_batch", UINT),
        ("max_extra_alloc", INT),
        ("worst_case_tokens", INT),
        ("rope_scaling_type", ENUM),
        ("pooling_type", ENUM),
        ("attention_type", ENUM),
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
        ("type_reduce", ENUM),
        *_CACHE_TYPES,
        ("logits_all", BOOL),
        ("embeddings", BOOL),
        ("offload_kqv", BOOL),
        ("flash_attn", BOOL),
        ("mla_attn", ctypes.c_int),
        ("attn_max_batch", ctypes.c_int),
        ("fused_moe_up_gate", BOOL),
        ("grouped_expert_routing", BOOL),
        ("fused_up_gate", BOOL),
        ("fused_mmad", BOOL),
        ("rope_cache", BOOL),
        ("graph_reuse", BOOL),
        ("min_experts", ctypes.c_int),
        ("thresh_experts", FLOAT),
        ("only_active_experts", BOOL),
        ("k_cache_hadamard", BOOL),
        ("v_cache_hadamard", BOOL),
        ("split_mode_graph_scheduling", BOOL),
        ("scheduler_async", BOOL),
        ("mtp", BOOL),
        ("mtp_op_type", ENUM),
        ("abort_callback", POINTER),
        ("abort_callback_data", POINTER),
        ("offload_policy", POINTER),
        ("cuda_params", POINTER),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [*BATCH_FIELDS, ("all_pos_0", INT), ("all_pos_1", INT), ("all_seq_id", INT)]


class _CacheView(ctypes.Structure):
    _fields_ = [
        ("n_cells", INT),
        ("n_seq_max", INT),
        ("token_count", INT),
        ("used_cells", INT),
        ("max_contiguous", INT),
        ("max_contiguous_idx", INT),
        ("cells", ctypes.POINTER(INT)),
        ("cells_sequences", ctypes.POINTER(INT)),
    ]


_GEMMA3_PATTERN = 6
"""It does not read this number from the file, and dies where no layer is without a window."""

_FLASH_TYPES = ("f16", "q8_0")
"""With other types of the cache it ends the process at the first call, or gives logits that have little to do
with those of 16-bit floats (tried: SmolLM2 135M, with and without flash attention). A V of q8_0 agrees on
random tokens and still wrote "I'shine" into the first answer that was asked for."""

_BLOCK_CELLS = 32
"""Cells of which the library looks at the last one alone when it looks for the end of those in use; with
flash attention it is a multiple."""

_OTHER_TYPES = {
    **dict.fromkeys(("type_k_first", "type_k_last", "type_v_first", "type_v_last"), 1),
    **dict.fromkeys(("n_k_first", "n_k_last", "n_v_first", "n_v_last"), -1),
}


class Ik(Library):
    """ik_llama.cpp: other kernels for the same files, on processors above all."""

    backend, title = "ik", "ik_llama.cpp"
    ModelParams, ContextParams, Batch = _ModelParams, (_ContextParams,), _Batch
    reuses_window_cells = False
    keeps_windows = False
    # iqk_fa_templates.h leaves out the blocks of cells, from the end, whose first cell is masked.
    flash_mixes_sequences = True
    state_flags = (0,)
    split_modes = ("none", "layer")
    model_defaults = {  # noqa: RUF012
        "split_mode": 1,
        "type_k": 1,
        "type_v": 1,
        "n_seq_max": 1,
        "n_ubatch": 512,
        **_OTHER_TYPES,
        "use_mmap": True,
        "flash_attn": True,
    }
    context_defaults = {  # noqa: RUF012
        "seed": 0xFFFFFFFF,
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "n_threads": 4,
        "n_threads_batch": 4,
        "max_extra_alloc": 256,
        "rope_scaling_type": -1,
        "pooling_type": -1,
        "attention_type": -1,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": -1.0,
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
        "defrag_thold": -1.0,
        "type_k": 1,
        "type_v": 1,
        "type_reduce": 1,
        **_OTHER_TYPES,
        "offload_kqv": True,
        "flash_attn": True,
        "mla_attn": 3,
        "fused_moe_up_gate": True,
        "fused_up_gate": True,
        "fused_mmad": True,
        "graph_reuse": True,
        "min_experts": -1,
    }
    signatures = {  # noqa: RUF012
        "llama_free_model": (None, POINTER),
        "llama_kv_cache_defrag": (None, POINTER),
        "llama_kv_cache_seq_cp": (None, POINTER, INT, INT, INT, INT),
        "llama_kv_cache_seq_pos_min": (INT, POINTER, INT),
        "llama_kv_cache_seq_rm": (BOOL, POINTER, INT, INT, INT),
        "llama_kv_cache_update": (INT, POINTER),
        "llama_kv_cache_view_free": (None, ctypes.POINTER(_CacheView)),
        "llama_kv_cache_view_init": (_CacheView, POINTER, INT),
        "llama_kv_cache_view_update": (None, POINTER, ctypes.POINTER(_CacheView)),
        "llama_n_ctx_train": (INT, POINTER),
        "llama_n_layer": (INT, POINTER),
        "llama_state_seq_get_data": (SIZE, POINTER, POINTER, SIZE, INT, UINT),
        "llama_state_seq_get_size": (SIZE, POINTER, INT, UINT),
        "llama_state_seq_set_data": (SIZE, POINTER, POINTER, SIZE, INT, UINT),
        "llama_token_get_attr": (ENUM, POINTER, INT),
        "llama_token_to_piece_vocab": (INT, POINTER, INT, TEXT, INT, INT, BOOL),
        "llama_vocab_tokenize": (INT, POINTER, TEXT, INT, POINTER, INT, BOOL, BOOL),
    }

    def suits(self, options: LoadOptions) -> bool:
        # Several sequences cannot have flash attention; whether there will be some is not known here.
        if options.flash_attention == "on":
            return False
        types = options.cache_type_k in _FLASH_TYPES and options.cache_type_v == "f16"
        return options.full_window and types and options.split_mode in self.split_modes

    def cache_types(self, flash_attention: str) -> tuple[Collection[str], Collection[str]]:
        if flash_attention == "off":
            return (*UNQUANTIZED, "q8_0"), ("f16", "bf16")
        return _FLASH_TYPES, ("f16",)

    def _set_model_params(self, params: Any, options: LoadOptions) -> None:
        if options.gpu_layers < 0:  # "all" is a number here
            params.n_gpu_layers = 999 if self.functions.llama_supports_gpu_offload() else 0
        params.split_mode = self.split_mode(options.split_mode)
        params.use_mmap, params.use_mlock = options.mmap, options.mlock
        params.repack_tensors = options.extra_buffer_types

    def _set_context_params(self, params: Any, settings: ContextSettings) -> None:
        options = settings.options
        params.flash_attn = settings.flash_attention != "off"
        params.type_k = CONTEXT_TYPES[options.cache_type_k]
        params.type_v = CONTEXT_TYPES[options.cache_type_v]

    def _hyperparameter(self, model: int, name: str) -> int:
        """A number of the file's metadata; 0 where it is absent, or differs between layers."""
        value = self.metadata(model, f"{self.metadata(model, 'general.architecture')}.{name}")
        return int(value) if value.isdigit() else 0

    def why_not(self, model: int) -> str:
        if self.functions.llama_model_is_recurrent(model):
            return f"{self.title} does not run recurrent models"
        pattern = self._hyperparameter(model, "attention.sliding_window_pattern") or _GEMMA3_PATTERN
        is_gemma3 = self.metadata(model, "general.architecture") == "gemma3"
        if is_gemma3 and (pattern != _GEMMA3_PATTERN or self.num_layers(model) < _GEMMA3_PATTERN):
            return f"{self.title} takes each {_GEMMA3_PATTERN}th layer of a gemma3 for one without a window"
        return ""

    def free_model(self, model: int) -> None:
        self.functions.llama_free_model(model)

    def trained_context(self, model: int) -> int:
        return int(self.functions.llama_n_ctx_train(model))

    def window_tokens(self, model: int) -> int:
        return self._hyperparameter(model, "attention.sliding_window")

    def num_layers(self, model: int) -> int:
        return int(self.functions.llama_n_layer(model))

    def num_heads(self, model: int) -> int:
        return self._hyperparameter(model, "attention.head_count")

    def num_kv_heads(self, model: int) -> int:
        return self._hyperparameter(model, "attention.head_count_kv") or self.num_heads(model)

    def is_diffusion(self, model: int) -> bool:  # noqa: ARG002 - it runs none
        return False

    def forget(self, context: int, sequence: int, start: int) -> bool:
        return bool(self.functions.llama_kv_cache_seq_rm(context, sequence, start, -1))

    def copy(self, context: int, source: int, sequence: int, length: int) -> None:
        self.functions.llama_kv_cache_seq_cp(context, source, sequence, 0, length)

    def oldest_position(self, context: int, sequence: int) -> int:
        return int(self.functions.llama_kv_cache_seq_pos_min(context, sequence))

    def make_room(self, context: int) -> bool:
        # The tokens of a call need cells in a row; rewinding and other sequences leave gaps.
        self.functions.llama_kv_cache_defrag(context)
        return bool(self.functions.llama_kv_cache_update(context) == 0)

    def close_gaps(self, context: int) -> bool:
        while self._overlooks_cells(context):
            if not self.make_room(context):
                return False
        return True

    def _overlooks_cells(self, context: int) -> bool:
        """Whether the last cell of a block is free while later ones are in use: a call would leave tokens out
        of its attention, the newest ones first."""
        native = self.functions
        view = native.llama_kv_cache_view_init(context, 1)
        try:
            native.llama_kv_cache_view_update(context, view)
            is_used = np.ctypeslib.as_array(view.cells, (view.n_cells,)) >= 0
        finally:
            native.llama_kv_cache_view_free(view)
        ends = is_used[::-1][::_BLOCK_CELLS]  # from the last cell on, as the library goes
        later = np.maximum.accumulate(is_used[::-1])[::_BLOCK_CELLS]
        return bool(np.any(later & ~ends))

    def token_attributes(self, model: int, vocab: int, token: int) -> int:  # noqa: ARG002
        return int(self.functions.llama_token_get_attr(model, token))

    def tokenize(self, vocab: int, *arguments: Any) -> int:
        return int(self.functions.llama_vocab_tokenize(vocab, *arguments))

    def token_to_piece(self, vocab: int, *arguments: Any) -> int:
        return int(self.functions.llama_token_to_piece_vocab(vocab, *arguments))
