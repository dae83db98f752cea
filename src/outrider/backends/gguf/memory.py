"""Refuse a KV cache that cannot be before llama.cpp tries to build it.

The library fills what it allocates, cell by cell. Where the system promises more memory than it
has, a context that is far too large would not fail but get this process, or another, killed.
"""

from __future__ import annotations

import os
from pathlib import Path

from outrider.backends.gguf.library import Library
from outrider.backends.gguf.options import UNQUANTIZED, LoadOptions
from outrider.core.errors import OutOfMemory, SettingError

__all__ = ["available_bytes", "check_cache_types", "check_room", "head_widths"]

_CELL_BYTES = 48
"""What the library keeps on the host for every cell besides K and V: position and sequences."""

_BLOCK_VALUES = 32
"""of every quantized type that a cache can have"""

_MAX_CELLS = 2**31 - 1
"""Positions are 32-bit."""

_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q5_1": 5, "q5_0": 5}
"""Bits per value, rounded down; 4 for the others."""

_WAY_OUT = "Give a smaller context (-c, -cd) or a smaller cache type (-ctk, -ctv)."


def check_room(
    name: str,
    library: Library,
    model: int,
    options: LoadOptions,
    *,
    context_length: int,
    max_sequences: int,
    capacity_tokens: int,
) -> None:
    """Raise OutOfMemory when the KV cache needs more than the machine has.

    What is compared is the least that it can need: what passes here may still fail in the library.
    """
    what = f"{name} with a context of {context_length} tokens"
    if max_sequences > 1:
        what += f" for each of {max_sequences} sequences, {capacity_tokens} in all"
    cells = capacity_tokens
    if cells > _MAX_CELLS:
        raise OutOfMemory(what, f"llama.cpp cannot number more than {_MAX_CELLS} positions", _WAY_OUT)
    needed, available = cells * _bytes_per_token(library, model, options), available_bytes()
    if needed > available:
        reason = f"its KV cache needs {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are free"
        raise OutOfMemory(what, reason, _WAY_OUT)


def check_cache_types(library: Library, model: int, options: LoadOptions) -> None:
    """Raise SettingError for a type that the library is not right with, and for a quantized cache whose
    blocks do not fit the model's heads: the library checks that only under flash attention, and ends the
    process otherwise."""
    types = (options.cache_type_k, options.cache_type_v)
    for name, cache_type, right in zip(
        "kv", types, library.cache_types(options.flash_attention), strict=True
    ):
        if cache_type not in right:
            attention = "without" if options.flash_attention == "off" else "with"
            why = f"{library.title} is not right with {cache_type} {attention} flash attention"
            choices = f"Choose one of {', '.join(right)}, or another library (--backend)."
            raise SettingError(f"cache type {name}", why, choices)
    for name, cache_type, width in zip("kv", types, head_widths(library, model), strict=True):
        if cache_type not in UNQUANTIZED and width % _BLOCK_VALUES:
            raise SettingError(
                f"cache type {name}",
                f"{cache_type} comes in blocks of {_BLOCK_VALUES} values, and the model's heads have {width}",
                f"Choose one of {', '.join(UNQUANTIZED)}.",
            )


def _bytes_per_token(library: Library, model: int, options: LoadOptions) -> int:
    """The least that a token takes on the host. K and V are left out where some layers keep none,
    or only a window of them, or where they may lie on another device."""
    native = library.functions
    if native.llama_model_is_recurrent(model):
        return 0
    partial = native.llama_model_is_hybrid(model) or (
        library.window_tokens(model) > 0 and not options.full_window
    )
    if partial or (options.gpu_layers != 0 and native.llama_supports_gpu_offload()):
        return _CELL_BYTES
    values = library.num_layers(model) * _values_per_layer(library, model)
    bits = _BITS.get(options.cache_type_k, 4) + _BITS.get(options.cache_type_v, 4)
    return int(_CELL_BYTES + values * bits // 8)


def _values_per_layer(library: Library, model: int) -> int:
    """Values in the K of one layer (and of its V); 0 where the layers differ or compress them."""
    prefix = f"{library.metadata(model, 'general.architecture')}.attention"
    unlike = ("kv_lora_rank", "shared_kv_layers")
    # A list, one entry for each layer, is no metadata that the library shows.
    uniform = library.metadata(model, f"{prefix}.head_count_kv").isdigit()
    if not uniform or any(library.metadata(model, f"{prefix}.{key}") for key in unlike):
        return 0
    return int(library.num_kv_heads(model) * min(head_widths(library, model)))


def head_widths(library: Library, model: int) -> tuple[int, int]:
    """Values of one attention head in K and in V."""
    usual = library.functions.llama_model_n_embd(model) // max(library.num_heads(model), 1)
    arch = library.metadata(model, "general.architecture")
    key, value = (library.metadata(model, f"{arch}.attention.{name}_length") for name in ("key", "value"))
    return int(key) if key.isdigit() else usual, int(value) if value.isdigit() else usual


def available_bytes() -> float:
    """Memory that can be had without pushing others out; infinite where it cannot be found out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.strip()}
        free = (kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return _total_bytes()
    return min(free, _group_limit_bytes())


def _total_bytes() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _group_limit_bytes() -> float:
    """What a container may use in all."""
    try:
        return float(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return float("inf")
