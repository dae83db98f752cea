"""Contexts of a native library: what is settled before one is opened, and what goes into it and out of it.
The library fills what it allocates, cell by cell. Where the system promises more memory than it has, a
context that is far too large would not fail but get this process, or another, killed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.backends.gguf.library import Library
from outrider.backends.gguf.log import clear_log, last_error, silenced, speaks_of_memory
from outrider.backends.gguf.memory import HOST, Contexts, what_would_fit
from outrider.backends.gguf.options import MTP_CONTEXT, UNQUANTIZED, LoadOptions, Opening
from outrider.backends.machine import available_bytes
from outrider.core.data import Span
from outrider.core.errors import BackendError, ModelFileError, OutOfMemory, SettingError
from outrider.core.numbers import gigabytes
from outrider.models.gguf import Layout

_NARROW_HEAD = 64
"""values. On a processor llama.cpp's flash attention goes through the cache token by token: with heads of 64
a call over four tokens at 600 of context took 1.9 times as long so (SmolLM2-135M; Qwen2.5 0.5B: 1.4), with
heads of 128 and 256 about the same (benchmarks/attention)."""
_MAX_SCORES_BYTES = 256 * 2**20
"""of the attention scores that are held at once without it"""
_CELL_BYTES = 48
"""What the library keeps on the host for every cell besides K and V: position and sequences."""
_BLOCK_VALUES = 32
"""of every quantized type that a cache can have"""
_MAX_CELLS = 2**31 - 1
"""Positions are 32-bit."""
_MAX_SEQUENCES = 256
"""Mainline's own limit (LLAMA_MAX_SEQ)."""
SMALLER_CONTEXT = "Give a smaller context (-c) or a smaller cache type (-ctk, -ctv)."


def choose_attention(
    library: Library, layout: Layout, options: LoadOptions, capacity_tokens: int, *, in_order: bool
) -> str:
    """What `options.flash_attention` comes to. `in_order`: the cells of a sequence lie in order and without
    gaps, and no adapter or window is in use. Raises SettingError where the library's gives wrong results."""
    asked = options.flash_attention
    if not library.flash_mixes_sequences:
        rows = min(options.micro_batch_tokens, max(options.batch_tokens, options.max_rows))
        scores_bytes = 4 * rows * capacity_tokens * layout.attention_heads
        is_open = asked == "auto" and options.cache_type_v in UNQUANTIZED and not library.uses_gpu(options)
        is_cheaper = max(layout.head_widths) <= _NARROW_HEAD and scores_bytes <= _MAX_SCORES_BYTES
        return "off" if is_open and is_cheaper else asked
    if in_order:
        return asked
    if asked == "on" or options.cache_type_v != "f16":
        what = "flash attention" if asked == "on" else f"cache type v {options.cache_type_v}"
        title = f"{library.title}'s flash attention"
        why = f"{title} is right for a single sequence without a sliding window and LoRA only"
        raise SettingError(what, why, "Choose --backend llama.cpp, or leave it at its default.")
    return "off"


def _check_cache_types(library: Library, layout: Layout, options: LoadOptions) -> None:
    """Raise SettingError for a type that the library computes wrongly with, and for a quantized cache whose
    blocks do not fit the model's heads: the library checks that only under flash attention, and ends the
    process otherwise."""
    right_types = library.cache_types(options.flash_attention)
    types = (options.cache_type_k, options.cache_type_v)
    for name, cache_type, right, width in zip("kv", types, right_types, layout.head_widths, strict=True):
        what = f"cache type {name}"
        if cache_type not in right:
            attention = "without" if options.flash_attention == "off" else "with"
            why = f"{library.title} is not right with {cache_type} {attention} flash attention"
            raise SettingError(
                what, why, f"Choose one of {', '.join(right)}, or another library (--backend)."
            )
        if cache_type not in UNQUANTIZED and width % _BLOCK_VALUES:
            why = (
                f"{cache_type} comes in blocks of {_BLOCK_VALUES} values, and the model's heads have {width}"
            )
            raise SettingError(what, why, f"Choose one of {', '.join(UNQUANTIZED)}.")


def _check_room(library: Library, layout: Layout, opening: Opening) -> None:
    options, tokens = opening.options, opening.capacity_tokens
    what = f"{opening.name} with a context of {opening.context_length} tokens"
    if opening.max_sequences > 1:
        what += f" for each of {opening.max_sequences} sequences, {tokens} in all"
    if tokens > _MAX_CELLS:
        raise OutOfMemory(what, f"llama.cpp cannot number more than {_MAX_CELLS} positions", SMALLER_CONTEXT)
    of_head = opening.kind == MTP_CONTEXT
    contexts = Contexts(layout, options, *((0, tokens) if of_head else (tokens, 0)))
    _, kv = contexts.needed(on_gpus=library.uses_gpu(options))[HOST]
    needed, available = kv and kv + tokens * _CELL_BYTES, available_bytes()
    if needed > available:
        reason = f"its KV cache needs {gigabytes(needed)}, and {gigabytes(available)} are free"
        raise OutOfMemory(what, reason, SMALLER_CONTEXT)


def open_context(library: Library, model: int, layout: Layout, opening: Opening) -> int:
    """The native context of a model or of its MTP layers. Raises SettingError, OutOfMemory, or BackendError
    where the library refuses it for another reason."""
    length, count = opening.context_length, opening.max_sequences
    if length < 2:
        raise SettingError("context size", f"{length} tokens are too few", "Give 2 or more (-c).")
    if not 1 <= count <= _MAX_SEQUENCES - opening.spare_sequences:
        raise SettingError("sequences", f"{count} cannot be served at once", f"Give 1 to {_MAX_SEQUENCES}.")
    _check_cache_types(library, layout, opening.options)
    _check_room(library, layout, opening)
    library.take_log()
    clear_log()
    if context := library.open_context(model, opening):
        arch = library.metadata(model, "general.architecture")
        if library.warms_up and library.metadata(model, f"{arch}.expert_count"):
            _end_warm_up(library, context)
        return context
    what, reason = f"{opening.name} with a context of {length} tokens", last_error("")
    if reason and not speaks_of_memory(reason):
        raise BackendError(what, reason, "Choose other settings for the context.")
    model_with = Contexts(layout, opening.options, opening.capacity_tokens)
    fitting = what_would_fit(library, model_with, is_loaded=True)
    raise OutOfMemory(what, reason or f"{library.title} could not create it", fitting or SMALLER_CONTEXT)


def _end_warm_up(library: Library, context: int) -> None:
    """Make a call of one token, whichever, and forget it: the next call is no warm-up any more."""
    batch = LlamaBatch(library.Batch, 1)
    library.functions.llama_decode(context, batch.fill([Span(0, (0,), 0, 1)]))
    library.functions.llama_synchronize(context)  # counts it
    library.functions.llama_memory_seq_rm(library.memory(context), 0, -1, -1)


# LoRA adapters: files of small matrices that are added to a model's own, each with a scale.

Adapters = list[tuple[int, float]]
"""Native adapters, each with its scale. They live as long as their model, and are freed with it."""


def load_adapters(library: Library, model: int, adapters: tuple[tuple[str, float], ...]) -> Adapters:
    """The native adapters of these files. Raises ModelFileError for one that the library cannot use."""
    found: Adapters = []
    for name, scale in adapters:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ModelFileError(name, "there is no such file", "Name a LoRA adapter (GGUF).")
        clear_log()
        with silenced():
            adapter = library.functions.llama_adapter_lora_init(model, os.fsencode(path))
        if not adapter:
            why = last_error(f"{library.title} could not load it")
            raise ModelFileError(name, why, "Name a LoRA adapter (GGUF) that was made for this model.")
        if library.needs_invocation(adapter):
            why = "it is an activated LoRA, which would change the text after certain tokens alone"
            raise ModelFileError(name, why, "Name an ordinary LoRA adapter.")
        found.append((adapter, scale))
    return found


def use_adapters(library: Library, context: int, adapters: Adapters) -> None:
    """Add adapters to what a context computes. Raises BackendError."""
    clear_log()
    if adapters and not library.use_adapters(context, adapters):
        raise BackendError("LoRA adapters", last_error(f"{library.title} could not apply them"))


# A model call's spans, laid out as the library reads them.


class LlamaBatch:
    """The arrays of a llama_batch (the structure `kind`) of up to `size` tokens, refilled for every call."""

    def __init__(self, kind: type[ctypes.Structure], size: int) -> None:
        self._token = np.zeros(size, dtype=np.int32)
        self._position = np.zeros(size, dtype=np.int32)
        self._sequence = np.zeros(size, dtype=np.int32)
        self._wanted = np.zeros(size, dtype=np.int8)
        self._num_sequences = np.ones(size, dtype=np.int32)
        # One sequence per token: each entry points at its own element of `_sequence`.
        self._sequences = self._sequence.ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        self._native = kind(
            n_tokens=0,
            token=_pointer(self._token, ctypes.c_int32),
            pos=_pointer(self._position, ctypes.c_int32),
            n_seq_id=_pointer(self._num_sequences, ctypes.c_int32),
            seq_id=_pointer(self._sequences, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def fill(self, spans: Sequence[Span]) -> Any:
        """Lay the spans out one after another; returns the llama_batch over them. Whether they keep the
        library's rules is the caller's to check: it ends the process otherwise."""
        start = 0
        for span in spans:
            end = start + len(span.tokens)
            if end == start + 1:  # a slice takes ten times as long
                self._token[start], self._position[start] = span.tokens[0], span.start
                self._sequence[start], self._wanted[start] = span.sequence, span.rows
                start = end
                continue
            self._token[start:end] = span.tokens
            self._position[start:end] = range(span.start, span.start + len(span.tokens))
            self._sequence[start:end] = span.sequence
            self._wanted[start:end] = 0
            self._wanted[end - span.rows : end] = 1
            start = end
        self._native.n_tokens = start
        return self._native


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
