"""One native library that runs GGUF models: its functions, its identity, and what every such library does.

llama.cpp's C API exists in several dialects. What they share is declared here; what differs is declared
once for each of them, in `mainline` and `ik`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from outrider.backends.gguf.log import LOG_CALLBACK, log_callback, silenced
from outrider.backends.gguf.options import CONTEXT_TYPES, LoadOptions
from outrider.core.errors import BackendError

__all__ = ["BATCH_FIELDS", "ContextSettings", "Library", "LibraryFile", "LibraryRefused", "Signatures"]

# Where an assertion of a library fails, it would start a debugger and print its stack.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

Signatures = Mapping[str, tuple[Any, ...]]
"""The result type and then the argument types of C functions, by name."""

POINTER, INT, UINT, BOOL, TEXT = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_bool,
    ctypes.c_char_p,
)

SHARED: Signatures = {
    "llama_backend_init": (None,),
    "llama_free": (None, POINTER),
    "llama_get_logits": (POINTER, POINTER),
    "llama_log_set": (None, LOG_CALLBACK, POINTER),
    "llama_model_get_vocab": (POINTER, POINTER),
    "llama_model_has_decoder": (BOOL, POINTER),
    "llama_model_has_encoder": (BOOL, POINTER),
    "llama_model_is_hybrid": (BOOL, POINTER),
    "llama_model_is_recurrent": (BOOL, POINTER),
    "llama_model_meta_val_str": (INT, POINTER, TEXT, TEXT, ctypes.c_size_t),
    "llama_model_n_embd": (INT, POINTER),
    "llama_n_batch": (UINT, POINTER),
    "llama_n_ctx": (UINT, POINTER),
    "llama_n_threads": (INT, POINTER),
    "llama_n_threads_batch": (INT, POINTER),
    "llama_n_ubatch": (UINT, POINTER),
    "llama_supports_gpu_offload": (BOOL,),
    "llama_synchronize": (None, POINTER),
    "llama_vocab_bos": (INT, POINTER),
    "llama_vocab_eos": (INT, POINTER),
    "llama_vocab_get_add_bos": (BOOL, POINTER),
    "llama_vocab_get_text": (TEXT, POINTER, INT),
    "llama_vocab_is_eog": (BOOL, POINTER, INT),
    "llama_vocab_n_tokens": (INT, POINTER),
    "llama_vocab_type": (ctypes.c_int, POINTER),
}

_DEVICES: Signatures = {
    "ggml_backend_dev_count": (ctypes.c_size_t,),
    "ggml_backend_dev_get": (POINTER, ctypes.c_size_t),
    "ggml_backend_dev_description": (TEXT, POINTER),
}
"""Functions that only some builds have."""

BATCH_FIELDS: list[tuple[str, Any]] = [
    ("n_tokens", INT),
    ("token", ctypes.POINTER(INT)),
    ("embd", ctypes.POINTER(ctypes.c_float)),
    ("pos", ctypes.POINTER(INT)),
    ("n_seq_id", ctypes.POINTER(INT)),
    ("seq_id", ctypes.POINTER(ctypes.POINTER(INT))),
    ("logits", ctypes.POINTER(ctypes.c_int8)),
]
"""The beginning of every dialect's llama_batch."""

_RESULT_BY_FIRST_ARGUMENT = ("x86_64", "amd64")
"""Processors on which a function is given, as its first argument, where to write a large structure."""
_ROOM_BYTES = 256
_UNTOUCHED = 0xA5


class LibraryRefused(Exception):
    """A library cannot be used; the message says why."""


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


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """What a context is opened with. `flash_attention`: "on", "off", or "auto" for the library's choice."""

    options: LoadOptions
    flash_attention: str
    capacity_tokens: int
    max_sequences: int
    threads: int
    threads_batch: int


def _written_bytes(function: Any, kind: type[ctypes.Structure]) -> int:
    """How many bytes after its structure a function writes that returns `kind`."""
    size = ctypes.sizeof(kind)
    buffer = (ctypes.c_ubyte * (size + _ROOM_BYTES))(*[_UNTOUCHED] * (size + _ROOM_BYTES))
    function.restype, function.argtypes = None, [POINTER]
    function(buffer)
    return sum(byte != _UNTOUCHED for byte in buffer[size:])


class Library(ABC):
    """A loaded library. Raises LibraryRefused for one that lacks a function or lays out its parameters in
    another way than is declared here."""

    backend: ClassVar[str]
    """the name of the dialect: "llama.cpp" or "ik" """
    title: ClassVar[str]
    """its name in messages"""
    signatures: ClassVar[Signatures]
    """the functions of this dialect alone"""
    ModelParams: ClassVar[type[ctypes.Structure]]
    ContextParams: ClassVar[tuple[type[ctypes.Structure], ...]]
    """llama_context_params in each of the versions that are known"""
    Batch: ClassVar[type[ctypes.Structure]]
    model_defaults: ClassVar[Mapping[str, Any]]
    """what the library sets by itself; fields that are not named here are 0"""
    context_defaults: ClassVar[Mapping[str, Any]]
    keeps_windows: ClassVar[bool]
    """whether sliding-window layers can keep the KV of their window alone"""
    reuses_window_cells: ClassVar[bool]
    """whether tokens that a sliding window has left behind give way to others, even where all have room"""
    flash_mixes_sequences: ClassVar[bool]
    """whether its flash attention is right only for one sequence, whose cells lie in order"""
    state_flags: ClassVar[tuple[int, ...]] = ()
    """what the functions about a sequence's state are given beyond the sequence"""
    split_modes: ClassVar[tuple[str, ...]]
    """how a model can be split over several GPUs"""

    def __init__(self, file: LibraryFile, functions: ctypes.CDLL) -> None:
        self.file = file
        self.functions: Any = functions
        self._declare({**SHARED, **self.signatures})
        self.take_log()  # before anything is asked of it, so that not one line is written
        self._new_model_params = self._checked("model", self.ModelParams, self.model_defaults)
        self._new_context_params, context_params = self._known_context()
        self._declare(
            {
                "llama_decode": (INT, POINTER, self.Batch),
                "llama_init_from_model": (POINTER, POINTER, context_params),
                "llama_model_load_from_file": (POINTER, TEXT, self.ModelParams),
            }
        )
        functions.llama_backend_init()

    def take_log(self) -> None:
        """Let the library's log come here. Another package of the process may have taken it: llama_cpp does
        when it is imported."""
        self.functions.llama_log_set(log_callback, None)

    def _known_context(self) -> tuple[Any, type[ctypes.Structure]]:
        """The function that returns a context's default parameters, and the version that it returns."""
        for version in self.ContextParams:
            with suppress(LibraryRefused):
                return self._checked("context", version, self.context_defaults), version
        return self._checked("context", self.ContextParams[0], self.context_defaults), self.ContextParams[0]

    def _declare(self, signatures: Signatures) -> None:
        for name, (result, *arguments) in signatures.items():
            try:
                function = getattr(self.functions, name)
            except AttributeError:
                raise LibraryRefused(f"it has no function {name}") from None
            function.restype, function.argtypes = result, arguments

    def _checked(self, what: str, kind: type[ctypes.Structure], expected: Mapping[str, Any]) -> Any:
        """The function that returns default parameters, after a look at what it returns."""
        function = getattr(self.functions, f"llama_{what}_default_params")
        if platform.machine().lower() in _RESULT_BY_FIRST_ARGUMENT and _written_bytes(function, kind):
            raise LibraryRefused(f"its {what} parameters are larger than expected")
        function.restype, function.argtypes = kind, []
        params = function()
        for name, *_ in kind._fields_:
            value = getattr(params, name) or 0
            if value != expected.get(name, 0):
                raise LibraryRefused(
                    f"its {what} parameters are laid out in another way than expected: {name} is {value!r}"
                )
        return function

    # Identity

    @cached_property
    def build_id(self) -> str:
        """Names this build (`LibraryFile.build_id`)."""
        return self.file.build_id

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Processors and GPUs that it can compute on, as it describes them; empty where it does not say."""
        try:
            self._declare(_DEVICES)
        except LibraryRefused:
            return ()
        count, get, describe = (getattr(self.functions, name) for name in _DEVICES)
        return tuple(describe(get(i)).decode(errors="replace") for i in range(count()))

    # Models

    def load_model(self, path: Path, options: LoadOptions) -> int | None:
        """The native model; None where the library cannot load it (the log says why)."""
        params = self._new_model_params()
        params.n_gpu_layers = options.gpu_layers
        params.main_gpu = options.main_gpu
        self._set_model_params(params, options)
        with silenced():
            handle: int | None = self.functions.llama_model_load_from_file(os.fsencode(path), params)
        return handle

    def why_not(self, model: int) -> str:  # noqa: ARG002 - most libraries run what they load
        """Why it cannot run a model that it has loaded; empty where it can."""
        return ""

    def cache_types(self, flash_attention: str) -> tuple[Collection[str], Collection[str]]:  # noqa: ARG002
        """The types in which it can keep K, and V: as CONTEXT_TYPES names them."""
        return CONTEXT_TYPES, CONTEXT_TYPES

    def metadata(self, model: int, key: str) -> str:
        """A value of the GGUF's metadata as text; empty when it is absent."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.functions.llama_model_meta_val_str(model, key.encode(), buffer, size)
            if length < size:
                return buffer.value.decode("utf-8", errors="replace")
            size = length + 1

    def open_context(self, model: int, settings: ContextSettings) -> int | None:
        """The native context; None where there is no room for it (the log says why)."""
        options = settings.options
        params = self._new_context_params()
        params.n_ctx = settings.capacity_tokens
        params.n_seq_max = settings.max_sequences
        params.n_batch = max(options.batch_tokens, options.max_rows)
        params.n_ubatch = min(options.micro_batch_tokens, params.n_batch)
        if settings.max_sequences > 1 and self.reuses_window_cells and self.window_tokens(model):
            # It chooses the cells for all parts of a call before it computes the first, and then lets go of
            # tokens outside the window of the last part that are inside that of the first.
            params.n_batch = params.n_ubatch = max(params.n_ubatch, options.max_rows)
        params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
        self._set_context_params(params, settings)
        with silenced():
            context: int | None = self.functions.llama_init_from_model(model, params)
        return context

    def split_mode(self, name: str) -> int:
        """The library's number for a way to split a model over GPUs. Raises BackendError."""
        if name not in self.split_modes:
            choices = ", ".join(self.split_modes)
            raise BackendError(
                f"split mode {name}", f"{self.title} does not have it", f"Choose one of {choices}."
            )
        return {"none": 0, "layer": 1, "row": 2}[name]

    # What differs

    @abstractmethod
    def suits(self, options: LoadOptions) -> bool:
        """Whether it can do what the options ask for."""

    @abstractmethod
    def _set_model_params(self, params: Any, options: LoadOptions) -> None: ...

    @abstractmethod
    def _set_context_params(self, params: Any, settings: ContextSettings) -> None: ...

    @abstractmethod
    def free_model(self, model: int) -> None:
        """Give the weights' memory back."""

    @abstractmethod
    def trained_context(self, model: int) -> int:
        """Tokens of the contexts that the model was trained with."""

    @abstractmethod
    def window_tokens(self, model: int) -> int:
        """Positions that a sliding-window layer looks back, its own included; 0 where there is none."""

    @abstractmethod
    def num_layers(self, model: int) -> int:
        """Layers of the model."""

    @abstractmethod
    def num_heads(self, model: int) -> int:
        """Attention heads of the first layer."""

    @abstractmethod
    def num_kv_heads(self, model: int) -> int:
        """Heads in the KV cache of the first layer."""

    @abstractmethod
    def is_diffusion(self, model: int) -> bool:
        """Whether the model writes all of a text at once."""

    @abstractmethod
    def forget(self, context: int, sequence: int, start: int) -> bool:
        """Remove a sequence's tokens from position `start` on (-1: all); False where that is impossible."""

    @abstractmethod
    def copy(self, context: int, source: int, sequence: int, length: int) -> None:
        """Let `sequence` share the first `length` tokens of `source`."""

    def transfer(self, source: int, target: int) -> bool:
        """Let sequence 0 of an empty context hold, bit by bit, what it holds in another one on the same
        weights; False where the library cannot."""
        native, flags = self.functions, self.state_flags
        size = native.llama_state_seq_get_size(source, 0, *flags)
        buffer = (ctypes.c_ubyte * size)()
        written = native.llama_state_seq_get_data(source, buffer, size, 0, *flags)
        return bool(written and native.llama_state_seq_set_data(target, buffer, written, 0, *flags))

    @abstractmethod
    def oldest_position(self, context: int, sequence: int) -> int:
        """The first position that is stored of a sequence; -1 where it is empty."""

    @abstractmethod
    def make_room(self, context: int) -> bool:
        """Bring free cells together after a call found no room; False where that cannot help."""

    def close_gaps(self, context: int) -> bool:  # noqa: ARG002 - most libraries bear them
        """See to it that tokens which were forgotten between others do no harm to the next call; False where
        that failed."""
        return True

    @abstractmethod
    def token_attributes(self, model: int, vocab: int, token: int) -> int:
        """The bits of `llama_token_attr`."""

    @abstractmethod
    def tokenize(self, vocab: int, *arguments: Any) -> int:
        """`llama_tokenize` of a vocabulary: text, its bytes, buffer, size, add and parse special tokens."""

    @abstractmethod
    def token_to_piece(self, vocab: int, *arguments: Any) -> int:
        """`llama_token_to_piece` of a vocabulary: token, buffer, size, spaces to strip, special tokens."""
