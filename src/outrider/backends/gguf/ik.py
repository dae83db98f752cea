"""ik_llama.cpp (ik-llama-cpp-python 0.1.5): what it has otherwise than llama.cpp. Its API is that of 2024,
with parameters of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np

from outrider.backends.gguf.c_types import functions, structure
from outrider.backends.gguf.devices import NO_DEVICE
from outrider.backends.gguf.library import BATCH, Library
from outrider.backends.gguf.options import UNQUANTIZED, LoadOptions
from outrider.core.errors import SettingError

_LAYER_CACHE_TYPES = """
    enum type_k_first=1 type_k_last=1 type_v_first=1 type_v_last=1
    i32 n_k_first=-1 n_k_last=-1 n_v_first=-1 n_v_last=-1
"""
"""Other types of the KV cache for the first and last layers."""
_CacheView = structure(
    "llama_kv_cache_view",
    "i32 n_cells n_seq_max token_count used_cells max_contiguous max_contiguous_idx",
    "i32* cells cells_sequences",
)

_GEMMA3_PATTERN = 6
"""It does not read this number from the file, and dies where no layer is without a window."""

_FLASH_TYPES = ("f16", "q8_0")
"""With other types of the cache it ends the process at the first call, or gives logits that have little to do
with those of 16-bit floats (tried: SmolLM2 135M, with and without flash attention). A V of q8_0 agrees on
random tokens and still wrote "I'shine" into the first answer that was asked for."""

_BLOCK_CELLS = 32
"""To find the end of the cells in use the library looks at the last cell of each such block alone; with flash
attention it is a multiple."""


@cache
def _names(devices: tuple[str, ...]) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(",".join(devices).encode())


class Ik(Library):
    """ik_llama.cpp: other kernels for the same files, on processors above all."""

    backend, title = "ik", "ik_llama.cpp"
    marker = "llama_kv_cache_seq_rm"
    packages = (("ik-llama-cpp-python", "ik_llama_cpp"),)
    ModelParams = structure(
        "llama_model_params",
        """
        ptr devices
        i32 n_gpu_layers mla
        enum split_mode=1
        i32 main_gpu max_gpu ncmoe
        enum type_k=1 type_v=1
        u32 max_ctx_size
        i32 n_seq_max=1 n_ubatch=512 amb fit_margin
        bool fit
        i32 worst_graph_tokens
        """,
        _LAYER_CACHE_TYPES,
        """
        ptr tensor_split rpc_servers progress_callback progress_callback_user_data
        ptr kv_overrides tensor_buft_overrides
        bool vocab_only use_mmap=1 use_mlock check_tensors repack_tensors use_thp validate_quants merge_qkv
        bool merge_up_gate_exps mtp dry_run flash_attn=1
        """,
    )
    ContextParams = (
        structure(
            "llama_context_params",
            """
            u32 seed=0xFFFFFFFF n_ctx=512 n_batch=2048 n_ubatch=512 n_seq_max=1
            u32 n_threads=4 n_threads_batch=4
            i32 max_extra_alloc=256 worst_case_tokens
            enum rope_scaling_type=-1 pooling_type=-1 attention_type=-1
            f32 rope_freq_base rope_freq_scale yarn_ext_factor=-1 yarn_attn_factor=-1
            f32 yarn_beta_fast=-1 yarn_beta_slow=-1
            u32 yarn_orig_ctx
            f32 defrag_thold=-1
            ptr cb_eval cb_eval_user_data
            enum type_k=1 type_v=1 type_reduce=1
            """,
            _LAYER_CACHE_TYPES,
            """
            bool logits_all embeddings offload_kqv=1 flash_attn=1
            i32 mla_attn=3 attn_max_batch
            bool fused_moe_up_gate=1 grouped_expert_routing fused_up_gate=1 fused_mmad=1 rope_cache
            bool graph_reuse=1
            i32 min_experts=-1
            f32 thresh_experts
            bool only_active_experts k_cache_hadamard v_cache_hadamard
            bool split_mode_graph_scheduling scheduler_async mtp
            enum mtp_op_type
            ptr abort_callback abort_callback_data offload_policy cuda_params
            """,
        ),
    )
    QuantizeParams = structure(
        "llama_model_quantize_params",
        """
        i32 nthread
        enum ftype=9 output_tensor_type=400 token_embedding_type=400
        enum attn_q_type=400 attn_k_type=400 attn_v_type=400 attn_qkv_type=400 attn_output_type=400
        enum ffn_gate_type=400 ffn_down_type=400 ffn_up_type=400 ffn_gate_inp_type=400
        bool allow_requantize quantize_output_tensor=1 only_copy pure keep_split ignore_imatrix_rules
        bool only_repack dry_run partial_requant
        ptr imatrix kv_overrides custom_quants repack_pattern
        """,
    )
    Batch = structure("llama_batch", BATCH, "i32 all_pos_0 all_pos_1 all_seq_id")
    keeps_windows = False
    # iqk_fa_templates.h leaves out the blocks of cells, from the end, whose first cell is masked.
    flash_mixes_sequences = True
    warms_up = True
    state_flags = (0,)
    split_modes = ("none", "layer")
    names = {  # noqa: RUF012
        "llama_adapter_lora_init": "llama_lora_adapter_init",
        "llama_model_free": "llama_free_model",
        "llama_model_n_ctx_train": "llama_n_ctx_train",
        "llama_model_n_layer": "llama_n_layer",
        "llama_memory_seq_cp": "llama_kv_cache_seq_cp",
        "llama_memory_seq_pos_min": "llama_kv_cache_seq_pos_min",
        "llama_memory_seq_rm": "llama_kv_cache_seq_rm",
        "llama_token_to_piece": "llama_token_to_piece_vocab",
        "llama_tokenize": "llama_vocab_tokenize",
    }
    signatures = functions(
        """
        i32 llama_lora_adapter_set (ptr ptr f32)
        void llama_kv_cache_defrag (ptr)
        i32 llama_kv_cache_update (ptr)
        view llama_kv_cache_view_init (ptr i32)
        void llama_kv_cache_view_free (ptr)
        void llama_kv_cache_view_update (ptr ptr)
        size llama_state_seq_get_size (ptr i32 u32)
        size llama_state_seq_get_data llama_state_seq_set_data (ptr ptr size i32 u32)
        enum llama_token_get_attr (ptr i32)
        """,
        view=_CacheView,
    )

    def suits(self, options: LoadOptions) -> bool:
        # Several sequences cannot have flash attention; whether there will be some is not known here.
        if options.flash_attention == "on":
            return False
        types = options.cache_type_k in _FLASH_TYPES and options.cache_type_v == "f16"
        can_place = options.split_mode in self.split_modes and not self._lacks(options)
        return options.full_window and types and can_place

    def _lacks(self, options: LoadOptions) -> str:
        if not options.op_offload:
            return "--no-op-offload"
        scales = options.rope_scaling in ("linear", "yarn") or options.rope_freq_scale not in (0.0, 1.0)
        if scales or options.yarn_orig_ctx:  # tried: the logits stay as they are
            return "scaled positions (RoPE, YaRN)"
        gpus = [name for name in options.devices if name != NO_DEVICE]
        return f"a device {gpus[0]}" if gpus and not self.functions.llama_supports_gpu_offload() else ""

    def cache_types(self, flash_attention: str) -> tuple[Collection[str], Collection[str]]:
        if flash_attention == "off":
            return (*UNQUANTIZED, "q8_0"), ("f16", "bf16")
        return _FLASH_TYPES, ("f16",)

    def why_not(self, model: int) -> str:
        if self.functions.llama_model_is_recurrent(model):
            return f"{self.title} does not run recurrent models"
        if self.functions.llama_model_is_hybrid(model):
            # One sequence alone is right. Calls of two in turn are not, tidying the cache ends the process,
            # and after a failed call it says that a state was taken back which was not.
            return f"{self.title} mixes up the sequences of hybrid models"
        arch = self.metadata(model, "general.architecture")
        if self.metadata(model, f"{arch}.nextn_predict_layers") not in ("", "0"):
            return f"{self.title} dies where it tidies the cache of a model with MTP layers"
        pattern = self._attention(model, "sliding_window_pattern") or _GEMMA3_PATTERN
        is_gemma3 = arch == "gemma3"
        num_layers = self.functions.llama_model_n_layer(model)
        if is_gemma3 and (pattern != _GEMMA3_PATTERN or num_layers < _GEMMA3_PATTERN):
            return f"{self.title} takes each {_GEMMA3_PATTERN}th layer of a gemma3 for one without a window"
        return ""

    def _set_model_params(self, params: Any, options: LoadOptions) -> None:
        if options.gpu_layers < 0:  # "all" is a number here
            params.n_gpu_layers = 999 if self.functions.llama_supports_gpu_offload() else 0
        params.use_mmap, params.use_mlock = options.mmap, options.mlock
        params.repack_tensors = options.extra_buffer_types
        if missing := self._lacks(options):
            why = f"{self.title} does not have it"
            raise SettingError(missing, why, "Choose --backend llama.cpp, or leave it out.")
        if options.devices == (NO_DEVICE,):
            params.n_gpu_layers = 0
        elif options.devices:  # names, which it reads itself
            params.devices = ctypes.addressof(_names(options.devices))

    def _set_context_params(self, params: Any, options: LoadOptions, max_sequences: int) -> None:  # noqa: ARG002
        params.flash_attn = options.flash_attention != "off"

    def use_adapters(self, context: int, adapters: Sequence[tuple[int, float]]) -> bool:
        apply = self.functions.llama_lora_adapter_set
        return all(apply(context, adapter, scale) == 0 for adapter, scale in adapters)

    def window_tokens(self, model: int) -> int:
        return self._attention(model, "sliding_window")

    def _attention(self, model: int, name: str) -> int:
        """A number in the model's metadata; 0 where it is absent, or differs between layers."""
        arch = self.metadata(model, "general.architecture")
        value = self.metadata(model, f"{arch}.attention.{name}")
        return int(value) if value.isdigit() else 0

    def is_diffusion(self, model: int) -> bool:  # noqa: ARG002
        return False

    def needs_invocation(self, adapter: int) -> bool:  # noqa: ARG002
        return False

    def memory(self, context: int) -> int:
        return context

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
            native.llama_kv_cache_view_update(context, ctypes.byref(view))
            is_used = np.ctypeslib.as_array(view.cells, (view.n_cells,)) >= 0
        finally:
            native.llama_kv_cache_view_free(ctypes.byref(view))
        ends = is_used[::-1][::_BLOCK_CELLS]  # from the last cell on, as the library goes
        later = np.maximum.accumulate(is_used[::-1])[::_BLOCK_CELLS]
        return bool(np.any(later & ~ends))

    def token_attributes(self, model: int, vocab: int, token: int) -> int:  # noqa: ARG002
        return int(self.functions.llama_token_get_attr(model, token))
