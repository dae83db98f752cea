"""A native library that runs GGUF models: its functions, its identity, and what it can do. The C API is
llama.cpp's since 2026-09 (llama-cpp-python 0.3.36, xllamacpp 2026.10). A fork is a subclass that says what it
has otherwise (`ik`)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from outrider.backends.gguf.c_types import (
    CLibrary,
    LibraryRefused,
    Params,
    Signatures,
    check_layout,
    functions,
    structure,
)
from outrider.backends.gguf.devices import (
    NO_DEVICE,
    Places,
    device_array,
    list_devices,
    load_parts,
    override_array,
    share_array,
)
from outrider.backends.gguf.heads import HEAD_NAMES
from outrider.backends.gguf.log import ERROR_LEVEL, clear_log, last_error, log_callback, silenced
from outrider.backends.gguf.options import (
    CONTEXT_TYPES,
    FLASH_ATTENTION,
    ROPE_NUMBERS,
    ROPE_SCALINGS,
    SPLIT_MODES,
    LoadOptions,
    Opening,
)
from outrider.backends.machine import physical_cores
from outrider.core.contracts import Bytes
from outrider.core.errors import BackendError

# Where an assertion of a library fails, it would start a debugger and print its stack.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

SHARED = functions("""
    void llama_backend_init
    bool llama_supports_gpu_offload
    void llama_log_set (ptr ptr)
    void llama_free llama_model_free llama_synchronize (ptr)
    ptr llama_get_logits llama_model_get_vocab (ptr)
    bool llama_model_has_decoder llama_model_has_encoder llama_model_is_hybrid (ptr)
    bool llama_model_is_recurrent llama_vocab_get_add_bos (ptr)
    i32 llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer (ptr)
    i32 llama_n_threads llama_n_threads_batch (ptr)
    u32 llama_n_batch llama_n_ctx llama_n_ubatch (ptr)
    ptr llama_adapter_lora_init (ptr str)
    i32 llama_model_meta_val_str (ptr str str size)
    void llama_memory_seq_cp (ptr i32 i32 i32 i32)
    i32 llama_memory_seq_pos_min (ptr i32)
    bool llama_memory_seq_rm (ptr i32 i32 i32)
    i32 llama_vocab_bos llama_vocab_eos llama_vocab_n_tokens (ptr)
    enum llama_vocab_type (ptr)
    str llama_vocab_get_text (ptr i32)
    bool llama_vocab_is_eog (ptr i32)
    i32 llama_tokenize (ptr str i32 ptr i32 bool bool)
    i32 llama_token_to_piece (ptr i32 str i32 i32 bool)
""")
"""what all forks have, by some name"""

BATCH = """
    i32 n_tokens
    i32* token
    f32* embd
    i32* pos n_seq_id
    i32** seq_id
    i8* logits
"""
"""the beginning of every fork's llama_batch"""

_CONTEXT_FIRST = """
    u32 n_ctx=512 n_batch=2048 n_ubatch=512 n_seq_max=1 n_rs_seq n_outputs_max n_outputs_max_per_seq=1
    i32 n_threads=4 n_threads_batch=4
    enum ctx_type rope_scaling_type=-1 pooling_type=-1 attention_type=-1 flash_attn_type=-1
    f32 rope_freq_base rope_freq_scale yarn_ext_factor=-1 yarn_attn_factor=-1
    f32 yarn_beta_fast=-1 yarn_beta_slow=-1
    u32 yarn_orig_ctx
    f32 defrag_thold=-1
    ptr cb_eval cb_eval_user_data
    enum type_k=1 type_v=1
"""
_CONTEXT_LAST = """
    ptr abort_callback abort_callback_data
    bool embeddings offload_kqv=1 no_perf=1 op_offload=1 swa_full=1 kv_unified
    ptr samplers
    size n_samplers
    ptr ctx_other
"""
_PARTIAL_STATE = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent states, and what of a window is kept"""
_LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""llama_load_mode by whether files are mapped and locked in memory."""


class Handle:
    """A native object, freed once: when it is closed, or when nobody refers to it any more. The object that
    it depends on (`keeps`) lives at least as long as it does."""

    def __init__(self, name: str, pointer: int, free: Callable[[int], None], keeps: object = None) -> None:
        self._name = name
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, lambda pointer, _keeps: free(pointer), pointer, keeps)
        # The process gives everything back at its end, in an order that is always right.
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        if not self._finalizer.alive:
            raise BackendError(self._name, "the model was closed", "Load it again.")
        return self._pointer

    def close(self) -> None:
        """Free it now. Closing twice is harmless."""
        self._finalizer()


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """Where a library lies, and what it comes from: a package with its version, a build of the user's."""

    path: Path
    source: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.version}".strip()

    @property
    def build_id(self) -> str:
        digest = hashlib.blake2b(digest_size=6)
        folder = self.path.parent
        for path in sorted(folder.glob("*")) if folder.name == "lib" else [self.path]:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return f"{self} {digest.hexdigest()}"


class Library(CLibrary):
    """llama.cpp of ggml-org, loaded. Raises LibraryRefused for one that lacks a function or lays out its
    parameters in another way than is declared here."""

    backend: ClassVar[str] = "llama.cpp"
    """one of BACKENDS"""
    title: ClassVar[str] = "llama.cpp"
    marker: ClassVar[str] = "llama_memory_seq_rm"
    """a function that it alone has"""
    packages: ClassVar[tuple[tuple[str, str], ...]] = (
        ("llama-cpp-python", "llama_cpp"),
        ("xllamacpp", "xllamacpp"),
    )
    """distributions that bring it, and their modules; the preferred one first"""
    names: ClassVar[Mapping[str, str]] = {
        **HEAD_NAMES,  # and what some builds export under its C++ name alone
        "common_fit_params": "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32"
        "llama_model_tensor_buft_overridePmjPK22common_fit_extra_model14ggml_log_level",
    }
    signatures: ClassVar[Signatures] = functions("""
        u64 llama_adapter_get_alora_n_invocation_tokens (ptr)
        i32 llama_set_adapters_lora (ptr ptr size ptr)
        ptr llama_get_memory (ptr)
        bool llama_model_is_diffusion (ptr)
        i32 llama_model_n_swa (ptr)
        size llama_state_seq_get_size (ptr i32)
        size llama_state_seq_get_size_ext (ptr i32 u32)
        size llama_state_seq_get_data llama_state_seq_set_data (ptr ptr size i32)
        size llama_state_seq_get_data_ext llama_state_seq_set_data_ext (ptr ptr size i32 u32)
        enum llama_vocab_get_attr (ptr i32)
    """)
    """the functions of this fork alone"""
    ModelParams: ClassVar[type[Params]] = structure(
        "llama_model_params",
        """
        ptr devices tensor_buft_overrides
        i32 n_gpu_layers=-1
        enum split_mode=1 load_mode=-1 lazy_mode=1
        i32 main_gpu
        ptr tensor_split progress_callback progress_callback_user_data kv_overrides
        bool vocab_only check_tensors use_extra_bufts=1 no_host no_alloc load_mtp
        """,
    )
    ContextParams: ClassVar[tuple[type[Params], ...]] = (
        structure("llama_context_params", _CONTEXT_FIRST, _CONTEXT_LAST),  # llama-cpp-python 0.3.36
        structure("llama_context_params", _CONTEXT_FIRST, "size moe_cache_size", _CONTEXT_LAST),  # xllamacpp
    )
    """in each of the versions that are known"""
    QuantizeParams: ClassVar[type[Params]] = structure(
        "llama_model_quantize_params",
        """
        i32 nthread
        enum ftype=7 output_tensor_type=43 token_embedding_type=43
        bool allow_requantize quantize_output_tensor=1 only_copy pure keep_split dry_run
        ptr imatrix kv_overrides tt_overrides prune_layers
        size max_buf_size=0x200000000
        """,
    )
    Batch: ClassVar[type[ctypes.Structure]] = structure("llama_batch", BATCH)
    keeps_windows: ClassVar[bool] = True
    """whether sliding-window layers can keep the KV of their window alone; then tokens that have left it give
    way to others, even where all have room"""
    flash_mixes_sequences: ClassVar[bool] = False
    """whether its flash attention is right only for one sequence, whose cells lie in order"""
    warms_up: ClassVar[bool] = False
    """whether a context's first call of one token is a warm-up, with all experts active and wrong logits, if
    that token begins texts"""
    state_flags: ClassVar[tuple[int, ...]] = ()
    """further arguments of the functions about a sequence's state"""
    split_modes: ClassVar[tuple[str, ...]] = SPLIT_MODES
    """how a model can be split over several GPUs"""

    def __init__(self, file: LibraryFile, functions: ctypes.CDLL) -> None:
        self.file = file
        super().__init__(functions)
        self.declare({**SHARED, **self.signatures})
        self.take_log()  # before anything is asked of it, so that not one line is written
        self._new_model_params = self._default_params("model", self.ModelParams)
        self._new_context_params = self._default_params("context", *self.ContextParams)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        self.declare(
            {
                "llama_decode": (ctypes.c_int32, pointer, self.Batch),
                "llama_init_from_model": (pointer, pointer, self._new_context_params.restype),
                "llama_model_load_from_file": (pointer, text, self.ModelParams),
            }
        )
        clear_log()
        with silenced():
            why = load_parts(self, file.path.parent)
        self.why_no_gpu = why or last_error("")
        """what it says where it finds none, if anything"""
        functions.llama_backend_init()

    def take_log(self) -> None:
        """Let its log come here: llama_cpp takes it when it is imported."""
        self.functions.llama_log_set(log_callback, None)

    def _default_params(self, what: str, *versions: type[Params]) -> Any:
        name = f"llama_{what}_default_params"
        self.declare({name: (None,)})
        function, refusals = getattr(self.functions, name), []
        for kind in versions:
            try:
                check_layout(function, kind, what)
            except LibraryRefused as refusal:
                refusals.append(refusal)
            else:
                return function
        raise refusals[0]

    def quantize_params(self) -> Any:
        """The default parameters of its quantizer. Raises LibraryRefused where it has none that is known."""
        self.declare(functions("u32 llama_model_quantize (str str ptr)"))
        return self._default_params("model_quantize", self.QuantizeParams)()

    # Identity

    @cached_property
    def build_id(self) -> str:
        return self.file.build_id

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Processors and GPUs that it can compute on, as it describes them; empty where it does not say."""
        return tuple(device.description for device in list_devices(self))

    def uses_gpu(self, options: LoadOptions) -> bool:
        on_processor = options.gpu_layers == 0 or options.devices == (NO_DEVICE,)
        return not on_processor and bool(self.functions.llama_supports_gpu_offload())

    def gpu_names(self, options: LoadOptions) -> str:
        """The GPUs that a model is put on, by the names that options have; empty where there are none."""
        gpus = [device.name for device in list_devices(self) if device.is_gpu]
        return ", ".join(options.devices or gpus) if self.uses_gpu(options) else ""

    # Models

    def suits(self, options: LoadOptions) -> bool:  # noqa: ARG002
        return True

    def load_model(self, path: Path, options: LoadOptions) -> int | None:
        """The native model; None where the library cannot load it (the log says why). Raises BackendError for
        a split mode that it does not have, SettingError for a device or a buffer."""
        params = self._model_params(options)
        with silenced():
            handle: int | None = self.functions.llama_model_load_from_file(os.fsencode(path), params)
        return handle

    def fit(self, path: Path, options: LoadOptions, tokens: int, spare_bytes: int) -> LoadOptions | None:
        """The options with what the library itself puts on its GPUs of a model with so many tokens of KV,
        with `spare_bytes` of each left free: layers, or single tensors. None where it does not say."""
        try:
            self.declare(functions("enum common_fit_params (str ptr ptr ptr ptr ptr u32 ptr enum)"))
            places = Places(self)
        except LibraryRefused:
            return None
        model, context = self._model_params(options), self._context_params(options, tokens, 1)
        spare = (ctypes.c_size_t * len(places.shares))(*[spare_bytes] * len(places.shares))
        given = (ctypes.byref(each) for each in (model, context, places.shares, places.overrides, spare))
        with silenced():
            status = self.functions.common_fit_params(os.fsencode(path), *given, tokens, None, ERROR_LEVEL)
        self.take_log()
        return replace(options, gpu_layers=model.n_gpu_layers, **places.decided()) if status == 0 else None

    def _model_params(self, options: LoadOptions) -> Any:
        params = self._new_model_params()
        params.n_gpu_layers, params.main_gpu = options.gpu_layers, options.main_gpu
        if options.split_mode not in self.split_modes:
            what, choices = f"split mode {options.split_mode}", ", ".join(self.split_modes)
            raise BackendError(what, f"{self.title} does not have it", f"Choose one of {choices}.")
        params.split_mode = SPLIT_MODES.index(options.split_mode)
        if options.tensor_split:
            params.tensor_split = ctypes.addressof(share_array(self, options.tensor_split))
        if options.tensor_overrides:
            array = override_array(self, options.tensor_overrides)
            params.tensor_buft_overrides = ctypes.addressof(array)
        self._set_model_params(params, options)
        return params

    def _set_model_params(self, params: Any, options: LoadOptions) -> None:
        params.load_mode = _LOAD_MODES[options.mmap, options.mlock]
        params.use_extra_bufts = options.extra_buffer_types
        if options.devices:
            params.devices = ctypes.addressof(device_array(self, options.devices))
        params.load_mtp = options.heads

    def why_not(self, model: int) -> str:  # noqa: ARG002
        return ""

    def is_diffusion(self, model: int) -> bool:
        return bool(self.functions.llama_model_is_diffusion(model))

    def window_tokens(self, model: int) -> int:
        """Positions that a sliding-window layer looks back, its own included; 0 where there is none."""
        return int(self.functions.llama_model_n_swa(model))

    def token_attributes(self, model: int, vocab: int, token: int) -> int:  # noqa: ARG002
        return int(self.functions.llama_vocab_get_attr(vocab, token))

    def metadata(self, model: int, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.functions.llama_model_meta_val_str(model, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = length + 1

    def samples(self, options: LoadOptions, num_layers: int) -> bool:
        """Whether samplers may be a part of a model's graph, and spare copies there (`top_logits`)."""
        # On a processor, sorting takes longer than the copy.
        is_whole = not 0 <= options.gpu_layers <= num_layers
        return options.backend_sampling and self.uses_gpu(options) and is_whole

    # LoRA adapters

    def needs_invocation(self, adapter: int) -> bool:
        """Whether an adapter is for the text after certain tokens alone."""
        return bool(self.functions.llama_adapter_get_alora_n_invocation_tokens(adapter))

    def use_adapters(self, context: int, adapters: Sequence[tuple[int, float]]) -> bool:
        """Add these adapters, each with its scale, to what a context computes; False where that failed."""
        count = len(adapters)
        pointers = (ctypes.c_void_p * count)(*(adapter for adapter, _ in adapters))
        scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
        return bool(self.functions.llama_set_adapters_lora(context, pointers, count, scales) == 0)

    # Contexts

    def cache_types(self, flash_attention: str) -> tuple[Collection[str], Collection[str]]:  # noqa: ARG002
        """The types in which it can keep K, and V: as CONTEXT_TYPES names them."""
        return CONTEXT_TYPES, CONTEXT_TYPES

    def open_context(self, model: int, opening: Opening) -> int | None:
        """The native context; None where there is no room for it (the log says why)."""
        options, max_sequences = opening.options, opening.max_sequences
        params = self._context_params(options, opening.capacity_tokens, max_sequences)
        params.n_seq_max = max_sequences + opening.spare_sequences
        params.n_batch = max(options.batch_tokens, options.max_rows)
        params.n_ubatch = min(params.n_ubatch, params.n_batch)
        if max_sequences > 1 and self.keeps_windows and self.window_tokens(model):
            # It chooses the cells for all parts of a call before it computes the first, and then lets go of
            # tokens outside the window of the last part that are inside that of the first.
            params.n_batch = params.n_ubatch = max(params.n_ubatch, options.max_rows)
        params.n_threads = options.threads or physical_cores()
        params.n_threads_batch = options.threads_batch or params.n_threads
        params.rope_scaling_type = ROPE_SCALINGS[options.rope_scaling]
        for name in ROPE_NUMBERS:
            setattr(params, name, getattr(options, name))
        if opening.kind:
            params.ctx_type = opening.kind
        if opening.beside:
            params.ctx_other = opening.beside
        with silenced():
            context: int | None = self.functions.llama_init_from_model(model, params)
        return context

    def _context_params(self, options: LoadOptions, capacity_tokens: int, max_sequences: int) -> Any:
        params = self._new_context_params()
        params.n_ctx, params.n_ubatch = capacity_tokens, options.micro_batch_tokens
        params.type_k = CONTEXT_TYPES[options.cache_type_k]
        params.type_v = CONTEXT_TYPES[options.cache_type_v]
        params.offload_kqv = options.kv_offload
        self._set_context_params(params, options, max_sequences)
        return params

    def _set_context_params(self, params: Any, options: LoadOptions, max_sequences: int) -> None:
        params.kv_unified = True  # else sequences with drafts of different length share no call
        # The library aborts where more rows are asked for, or more sequences than this.
        params.n_outputs_max = params.n_outputs_max_per_seq = max(options.max_rows, max_sequences)
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        params.swa_full = options.full_window
        params.op_offload = options.op_offload

    # The KV cache

    def memory(self, context: int) -> int:
        memory: int = self.functions.llama_get_memory(context)
        return memory

    def oldest_position(self, context: int, sequence: int) -> int:
        """The first position that a sequence stores; negative where it stores none."""
        return int(self.functions.llama_memory_seq_pos_min(self.memory(context), sequence))

    def state_bytes(self, context: int, sequence: int) -> int:
        """Bytes of what a sequence holds beside the KV of attention layers; 0 where it cannot be copied."""
        return int(self.functions.llama_state_seq_get_size_ext(context, sequence, _PARTIAL_STATE))

    def save_state(self, context: int, sequence: int, older: Bytes | None) -> Bytes | None:
        """Copy what a sequence holds beside the KV of attention layers, into an `older` copy that fits."""
        size = self.state_bytes(context, sequence)
        state = older if older is not None and older.size == size else np.empty(size, dtype=np.uint8)
        copied = self.functions.llama_state_seq_get_data_ext(
            context, state.ctypes.data, size, sequence, _PARTIAL_STATE
        )
        return state if size and copied == size else None

    def restore_state(self, context: int, sequence: int, state: Bytes) -> bool:
        """Put back what `save_state` copied; False where that is impossible."""
        read = self.functions.llama_state_seq_set_data_ext(
            context, state.ctypes.data, state.nbytes, sequence, _PARTIAL_STATE
        )
        return bool(read == state.nbytes)

    def make_room(self, context: int) -> bool:  # noqa: ARG002 - it takes free cells wherever they lie
        """Bring free cells together after a call found no room; False where that cannot help."""
        return False

    def close_gaps(self, context: int) -> bool:  # noqa: ARG002 - it bears them
        """Make the cache safe for calls after tokens between others were forgotten; False where it fails."""
        return True
