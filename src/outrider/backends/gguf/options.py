"""How a model is loaded, under llama.cpp's own names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.backends.gguf.devices import check_overrides
from outrider.core.errors import SettingError
from outrider.models.cache import fingerprint

BACKENDS = ("auto", "ik", "llama.cpp")
"""The libraries that run GGUF models; "auto" is the one that is measured faster for the file."""
SPLIT_MODES = ("none", "layer", "row", "tensor")
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
CONTEXT_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""Types that the KV cache can be stored in, and their numbers in ggml."""

ROPE_SCALINGS = {"": -1, "none": 0, "linear": 1, "yarn": 2}
"""How positions beyond the trained context are squeezed into it; "": as the model says."""

ROPE_NUMBERS = ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")
"""Options that llama_context_params has under the same names."""

ALL_LAYERS = 10_000
"""more than any model has"""
UNQUANTIZED = ("f32", "f16", "bf16")
_MAX_THREADS = 512
"""ggml's own limit"""
_MAX_TOKENS = 2**20
"""of one call: far above any use, far below what overflows the library's 32 bits"""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How weights are loaded and a context is opened.

    `threads` serves single-token calls and `threads_batch` those over more tokens; 0 means the machine's
    physical cores. `gpu_layers` -1 leaves open how many go to a GPU (`memory.place_layers`): all where nobody
    decides. `extra_buffer_types` are the repacked weight layouts (and AMX): faster, but see `guard`.
    `max_rows` caps the logits rows of one call; the library reserves memory for them. `backend` is one of
    BACKENDS, `library` the file of a native library to use ("": an installed one). `full_window` keeps the
    whole KV of sliding-window layers, so that tokens can be forgotten. `backend_sampling`: on a GPU the most
    likely tokens of each row may be picked there (`top_logits`). `heads`: the model's own heads (MTP) are
    loaded where its file has them.

    `devices` are GPUs by name, in order ("none" alone: no GPU), `tensor_split` their shares of the model,
    `tensor_overrides` single tensors' places (PATTERN=BUFFER, see `devices.override_array`). Without
    `kv_offload` the KV cache stays on the host, without `op_offload` so do large products of weights there.
    `adapters` are LoRA files with their scales. `rope_…` and `yarn_…` stretch the context; 0: as the model
    says.

    Raises SettingError for a value out of range."""

    gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    threads: int = 0
    threads_batch: int = 0
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    full_window: bool = True
    max_rows: int = 128
    backend_sampling: bool = True
    heads: bool = True
    extra_buffer_types: bool = True
    backend: str = "auto"
    library: str = ""
    devices: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] = ()
    tensor_overrides: tuple[str, ...] = ()
    kv_offload: bool = True
    op_offload: bool = True
    adapters: tuple[tuple[str, float], ...] = ()
    rope_scaling: str = ""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0

    def __post_init__(self) -> None:
        for name in ("devices", "tensor_split", "tensor_overrides", "adapters"):  # JSON has lists
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        _choice("backend", self.backend, BACKENDS)
        _choice("split mode", self.split_mode, SPLIT_MODES)
        _choice("flash attention", self.flash_attention, FLASH_ATTENTION)
        _choice("cache type k", self.cache_type_k, CONTEXT_TYPES)
        _choice("cache type v", self.cache_type_v, CONTEXT_TYPES)
        if self.flash_attention == "off" and self.cache_type_v not in UNQUANTIZED:
            raise SettingError(
                "cache type v",
                f"{self.cache_type_v} needs flash attention, which is off",
                f"Switch it on, or choose one of {', '.join(UNQUANTIZED)}.",
            )
        _in_range("gpu layers", self.gpu_layers, -1, 2**31 - 1)
        _in_range("main gpu", self.main_gpu, 0, 2**31 - 1)
        _in_range("threads", self.threads, 0, _MAX_THREADS)
        _in_range("threads (batch)", self.threads_batch, 0, _MAX_THREADS)
        _in_range("batch size", self.batch_tokens, 1, _MAX_TOKENS)
        _in_range("micro-batch size", self.micro_batch_tokens, 1, _MAX_TOKENS)
        _in_range("max rows", self.max_rows, 1, _MAX_TOKENS)
        check_overrides(self.tensor_overrides)
        _choice("rope scaling", self.rope_scaling, ROPE_SCALINGS)
        _in_range("yarn original context", self.yarn_orig_ctx, 0, 2**31 - 1)
        numbers = [*self.tensor_split, *(scale for _, scale in self.adapters)]
        if not all(map(math.isfinite, numbers)) or min(self.tensor_split, default=0) < 0:
            raise SettingError("tensor split or scale", "it is not a finite number", "Give 0 or more.")
        for name in ("rope_freq_base", "rope_freq_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                what, value = name.replace("_", " "), getattr(self, name)
                raise SettingError(what, f"{value} cannot be used", "Give 0 (as the model says) or more.")

    def rarely_set(self) -> dict[str, str | int | bool | float]:
        """Those of RARELY_SET that differ from their defaults; lists as text, adapters by their content."""
        values = {name: getattr(self, name) for name in RARELY_SET}
        values["adapters"] = tuple(
            (fingerprint(Path(file).expanduser()), scale) for file, scale in self.adapters
        )
        return {
            name: json.dumps(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != type(self).__dataclass_fields__[name].default
        }


MTP_CONTEXT = 1
"""LLAMA_CONTEXT_TYPE_MTP"""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a context is opened with. `spare_sequences` are for copies; `kind`: 0, or MTP_CONTEXT for the
    model's MTP layers; `beside`: the native context of the model that lends what this one lacks."""

    name: str
    options: LoadOptions
    context_length: int
    max_sequences: int
    capacity_tokens: int
    spare_sequences: int = 0
    kind: int = 0
    beside: int = 0


RARELY_SET = (
    "devices",
    "tensor_split",
    "tensor_overrides",
    "kv_offload",
    "op_offload",
    "adapters",
    *ROPE_NUMBERS,
    "rope_scaling",
)
"""Options that are named in what a curve, or a choice, belongs to only where they are set, so that the usual
names stay short."""


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise SettingError(name, f"{value!r} is not known", f"Choose one of {', '.join(choices)}.")


def _in_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise SettingError(name, f"{value} cannot be used", f"Give {least} to {most}.")
