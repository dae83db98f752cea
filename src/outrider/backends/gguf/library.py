"""One native library that runs GGUF models: its functions, its identity, and what every such library does.

llama.cpp's C API exists in several dialects. What they share is declared here; what differs is declared
once for each of them, in `mainline` and `ik`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from outrider.backends.gguf.c_types import (
    BOOL,
    ENUM,
    INT,
    POINTER,
    SIZE,
    TEXT,
    UINT,
    CLibrary,
    LibraryRefused,
    Params,
    Signatures,
    check_layout,
    fields,
    functions,
)
from outrider.backends.gguf.devices import (
    NO_DEVICE,
    list_devices,
    load_parts,
    override_array,
    share_array,
)
from outrider.backends.gguf.log import LOG_CALLBACK, clear_log, last_error, log_callback, silenced
from outrider.backends.gguf.options import (
    CONTEXT_TYPES,
    ROPE_NUMBERS,
    ROPE_SCALINGS,
    SPLIT_MODES,
    LoadOptions,
    Opening,
)
from outrider.backends.gguf.registry import TITLES
from outrider.backends.machine import physical_cores
from outrider.core.errors import BackendError
from outrider.core.saved import Bytes

# Where an assertion of a library fails, it would start a debugger and print its stack.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

SHARED: Signatures = {
    **functions("llama_backend_init", None),
    **functions("llama_supports_gpu_offload", BOOL),
    **functions("llama_log_set", None, LOG_CALLBACK, POINTER),
    **functions("llama_free llama_model_free llama_synchronize", None, POINTER),
    **functions("llama_get_logits llama_model_get_vocab", POINTER, POINTER),
    **functions("llama_model_has_decoder llama_model_has_encoder llama_model_is_hybrid", BOOL, POINTER),
    **functions("llama_model_is_recurrent llama_vocab_get_add_bos", BOOL, POINTER),
    **functions("llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer", INT, POINTER),
    **functions("llama_n_threads llama_n_threads_batch", INT, POINTER),
    **functions("llama_n_batch llama_n_ctx llama_n_ubatch", UINT, POINTER),
    **functions("llama_adapter_lora_init", POINTER, POINTER, TEXT),
    **functions("llama_model_meta_val_str", INT, POINTER, TEXT, TEXT, SIZE),
    **functions("llama_memory_seq_cp", None, POINTER, INT, INT, INT, INT),
    **functions("llama_memory_seq_pos_min", INT, POINTER, INT),
    **functions("llama_memory_seq_rm", BOOL, POINTER, INT, INT, INT),
    **functions("llama_vocab_bos llama_vocab_eos llama_vocab_n_tokens", INT, POINTER),
    **functions("llama_vocab_type", ENUM, POINTER),
    **functions("llama_vocab_get_text", TEXT, POINTER, INT),
    **functions("llama_vocab_is_eog", BOOL, POINTER, INT),
    **functions("llama_tokenize", INT, POINTER, TEXT, INT, POINTER, INT, BOOL, BOOL),
    **functions("llama_token_to_piece", INT, POINTER, INT, TEXT, INT, INT, BOOL),
}

BATCH_FIELDS = [
    *fields(INT, "n_tokens"),
    *fields(ctypes.POINTER(INT), "token"),
    *fields(ctypes.POINTER(ctypes.c_float), "embd"),
    *fields(ctypes.POINTER(INT), "pos", "n_seq_id"),
    *fields(ctypes.POINTER(ctypes.POINTER(INT)), "seq_id"),
    *fields(ctypes.POINTER(ctypes.c_int8), "logits"),
]
"""The beginning of every dialect's llama_batch."""


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
        """The native pointer. Raises BackendError when it was closed."""
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
        """Names this build: where it comes from, and a hash of its binaries' sizes and dates."""
        digest = hashlib.blake2b(digest_size=6)
        folder = self.path.parent
        for path in sorted(folder.glob("*")) if folder.name == "lib" else [self.path]:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return f"{self} {digest.hexdigest()}"


class Library(CLibrary, ABC):
    """A loaded library. Raises LibraryRefused for one that lacks a function or lays out its parameters in
    another way than is declared here."""

    backend: ClassVar[str]
    """the name of its row in `gguf.registry`"""
    signatures: ClassVar[Signatures]
    """the functions of this dialect alone"""
    ModelParams: ClassVar[type[Params]]
    ContextParams: ClassVar[tuple[type[Params], ...]]
    """llama_context_params in each of the versions that are known"""
    QuantizeParams: ClassVar[type[Params]]
    Batch: ClassVar[type[ctypes.Structure]]
    keeps_windows: ClassVar[bool]
    """whether sliding-window layers can keep the KV of their window alone"""
    reuses_window_cells: ClassVar[bool]
    """whether tokens that have left a sliding window give way to others, even where all have room"""
    keeps_states: ClassVar[bool] = False
    """whether recurrent states can be gone back to: by copies of them, or by snapshots that it keeps"""
    flash_mixes_sequences: ClassVar[bool]
    """whether its flash attention is right only for one sequence, whose cells lie in order"""
    warms_up: ClassVar[bool] = False
    """whether a context's first call of one token is a warm-up, with all experts active and wrong logits, if
    that token begins texts"""
    state_flags: ClassVar[tuple[int, ...]] = ()
    """further arguments of the functions about a sequence's state"""
    split_modes: ClassVar[tuple[str, ...]]
    """how a model can be split over several GPUs"""

    def __init__(self, file: LibraryFile, functions: ctypes.CDLL) -> None:
        self.file = file
        super().__init__(TITLES[self.backend], functions)
        self.declare({**SHARED, **self.signatures})
        self.take_log()  # before anything is asked of it, so that not one line is written
        self._new_model_params = self._default_params("model", self.ModelParams)
        self._new_context_params = self._default_params("context", *self.ContextParams)
        self.declare(
            {
                "llama_decode": (INT, POINTER, self.Batch),
                "llama_init_from_model": (POINTER, POINTER, self._new_context_params.restype),
                "llama_model_load_from_file": (POINTER, TEXT, self.ModelParams),
            }
        )
        clear_log()
        with silenced():
            why = load_parts(self, file.path.parent)
        self.why_no_gpu = why or last_error("")
        """what it says where it finds none, if anything"""
        functions.llama_backend_init()

    def take_log(self) -> None:
        """Let the library's log come here. Another package of the process may have taken it: llama_cpp does
        when it is imported."""
        self.functions.llama_log_set(log_callback, None)

    def _default_params(self, what: str, *versions: type[Params]) -> Any:
        """The function that returns default parameters, declared with the first of these structures that it
        turns out to return."""
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

    # Identity

    @cached_property
    def build_id(self) -> str:
        """Names this build."""
        return self.file.build_id

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Processors and GPUs that it can compute on, as it describes them; empty where it does not say."""
        return tuple(device.description for device in list_devices(self))

    def uses_gpu(self, options: LoadOptions) -> bool:
        """Whether layers of a model may be computed on a GPU."""
        on_processor = options.gpu_layers == 0 or options.devices == (NO_DEVICE,)
        return not on_processor and bool(self.functions.llama_supports_gpu_offload())

    def gpu_names(self, options: LoadOptions) -> str:
        """The GPUs that a model is put on, by the names that options have; empty where there are none."""
        gpus = [device.name for device in list_devices(self) if device.is_gpu]
        return ", ".join(options.devices or gpus) if self.uses_gpu(options) else ""

    def fit(self, path: Path, options: LoadOptions, tokens: int, spare_bytes: int) -> LoadOptions | None:  # noqa: ARG002
        """The options with as much of the model on the GPUs as the library itself reckons, with a context of
        `tokens` and with `spare_bytes` of each GPU left; None where it does not say."""
        return None

    # Models

    def load_model(self, path: Path, options: LoadOptions) -> int | None:
        """The native model; None where the library cannot load it (the log says why). Raises BackendError for
        a split mode that it does not have, SettingError for a device or a buffer."""
        params = self._model_params(options)
        with silenced():
            handle: int | None = self.functions.llama_model_load_from_file(os.fsencode(path), params)
        return handle

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

    def samples(self, options: LoadOptions, num_layers: int) -> bool:  # noqa: ARG002
        """Whether samplers may be a part of a model's graph, and spare copies there (`top_logits`)."""
        return False

    def why_not(self, model: int) -> str:  # noqa: ARG002 - most libraries run what they load
        """Why it cannot run a model that it has loaded; empty where it can."""
        return ""

    def cache_types(self, flash_attention: str) -> tuple[Collection[str], Collection[str]]:  # noqa: ARG002
        """The types in which it can keep K, and V: as CONTEXT_TYPES names them."""
        return CONTEXT_TYPES, CONTEXT_TYPES

    def load_adapter(self, model: int, path: Path) -> int | None:
        """The native LoRA adapter of a file; None where the model cannot have it (the log says why)."""
        with silenced():
            adapter: int | None = self.functions.llama_adapter_lora_init(model, os.fsencode(path))
        return adapter

    def needs_invocation(self, adapter: int) -> bool:  # noqa: ARG002
        """Whether an adapter is for the text after certain tokens alone."""
        return False

    def metadata(self, model: int, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.functions.llama_model_meta_val_str(model, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = length + 1

    def hyperparameter(self, model: int, name: str) -> int:
        """A number of the model's attention, from its metadata; 0 where it is absent, or differs between
        layers."""
        arch = self.metadata(model, "general.architecture")
        value = self.metadata(model, f"{arch}.attention.{name}")
        return int(value) if value.isdigit() else 0

    def open_context(self, model: int, opening: Opening) -> int | None:
        """The native context; None where there is no room for it (the log says why)."""
        options, max_sequences = opening.options, opening.max_sequences
        params = self._new_context_params()
        params.n_ctx = opening.capacity_tokens
        params.n_seq_max = max_sequences + opening.spare_sequences
        params.n_batch = max(options.batch_tokens, options.max_rows)
        params.n_ubatch = min(options.micro_batch_tokens, params.n_batch)
        if max_sequences > 1 and self.reuses_window_cells and self.window_tokens(model):
            # It chooses the cells for all parts of a call before it computes the first, and then lets go of
            # tokens outside the window of the last part that are inside that of the first.
            params.n_batch = params.n_ubatch = max(params.n_ubatch, options.max_rows)
        params.n_threads = options.threads or physical_cores()
        params.n_threads_batch = options.threads_batch or params.n_threads
        params.type_k = CONTEXT_TYPES[options.cache_type_k]
        params.type_v = CONTEXT_TYPES[options.cache_type_v]
        params.offload_kqv = options.kv_offload
        params.rope_scaling_type = ROPE_SCALINGS[options.rope_scaling]
        for name in ROPE_NUMBERS:
            setattr(params, name, getattr(options, name))
        self._set_context_params(params, options, max_sequences)
        if opening.snapshots:
            params.n_rs_seq = opening.snapshots
        if opening.kind:
            params.ctx_type = opening.kind
        if opening.beside:
            params.ctx_other = opening.beside
        with silenced():
            context: int | None = self.functions.llama_init_from_model(model, params)
        return context

    # The KV cache

    def memory(self, context: int) -> int:
        """What the functions about the KV cache take."""
        return context

    def snapshots(self, context: int) -> int:  # noqa: ARG002 - most keep none
        """How many snapshots of its recurrent state a sequence has: 0 for kinds of models that have none."""
        return 0

    def oldest_position(self, context: int, sequence: int) -> int:
        """The first position that a sequence stores; negative where it stores none."""
        return int(self.functions.llama_memory_seq_pos_min(self.memory(context), sequence))

    def state_bytes(self, context: int, sequence: int) -> int:  # noqa: ARG002
        """Bytes of what a sequence holds beside the KV of attention layers; 0 where it cannot be copied."""
        return 0

    def save_state(self, context: int, sequence: int, older: Bytes | None) -> Bytes | None:  # noqa: ARG002
        """Copy what a sequence holds beside the KV of attention layers, into an `older` copy where that fits;
        None where that is impossible."""
        return None

    def restore_state(self, context: int, sequence: int, state: Bytes) -> bool:  # noqa: ARG002
        """Put back what `save_state` copied; False where that is impossible."""
        return False

    def make_room(self, context: int) -> bool:  # noqa: ARG002 - most take free cells wherever they lie
        """Bring free cells together after a call found no room; False where that cannot help."""
        return False

    def close_gaps(self, context: int) -> bool:  # noqa: ARG002 - most libraries bear them
        """Make the cache safe for the next call after tokens between others were forgotten; False where that
        failed."""
        return True

    @abstractmethod
    def use_adapters(self, context: int, adapters: Sequence[tuple[int, float]]) -> bool:
        """Add these adapters, each with its scale, to what a context computes; False where that failed."""

    # Quantizing

    def quantize_params(self) -> Any:
        """The default parameters of its quantizer. Raises LibraryRefused where it has none that is known."""
        self.declare({"llama_model_quantize": (UINT, TEXT, TEXT, ctypes.POINTER(self.QuantizeParams))})
        return self._default_params("model_quantize", self.QuantizeParams)()

    # What differs

    def suits(self, options: LoadOptions) -> bool:  # noqa: ARG002
        """Whether it can do what the options ask for."""
        return True

    @abstractmethod
    def _set_model_params(self, params: Any, options: LoadOptions) -> None: ...

    @abstractmethod
    def _set_context_params(self, params: Any, options: LoadOptions, max_sequences: int) -> None: ...

    @abstractmethod
    def window_tokens(self, model: int) -> int:
        """Positions that a sliding-window layer looks back, its own included; 0 where there is none."""

    def is_diffusion(self, model: int) -> bool:  # noqa: ARG002
        """Whether the model writes all of a text at once."""
        return False

    @abstractmethod
    def token_attributes(self, model: int, vocab: int, token: int) -> int:
        """The bits of `llama_token_attr`."""
