"""What a model's header says of its parts: bytes of its tensors, and what each layer keeps of a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.models.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys
from outrider.models.header import Header, TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
"""One layer in so many has no window, by llama.cpp's own defaults for files that do not say it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """How many values of K and V a layer keeps of a token. `has_window`: of the last tokens alone, unless all
    are kept."""

    key_values: int = 0
    value_values: int = 0
    has_window: bool = False

    def cell_bytes(self, type_k: str, type_v: str) -> float:
        """Of a token's K and V, in caches of these types."""
        parts = ((self.key_values, type_k), (self.value_values, type_v))
        sizes = ((values, GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]) for values, kind in parts)
        return sum(values * size / block for values, (block, size) in sizes)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model is made of: bytes of each tensor, and its layers.

    The last `num_heads` of the layers predict tokens after the next one (MTP). `attention` is the width of
    all heads of attention, `head_widths` are those of one head in K and in V.
    """

    name: str
    tensors: Mapping[str, int]
    layers: Sequence[Layer]
    num_heads: int = 0
    attention: int = 0
    attention_heads: int = 0
    head_widths: tuple[int, int] = (0, 0)


def read_layout(header: Header, tensors: Sequence[TensorInfo], name: str) -> Layout:
    """The layout of a model, by the first of its headers and all of its tensors."""
    arch = header.text(Keys.General.ARCHITECTURE) or ""

    def number(key: str) -> int:
        return header.number(key.format(arch=arch)) or 0

    num_layers, heads = number(Keys.LLM.BLOCK_COUNT), number(Keys.Attention.HEAD_COUNT)
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_layers)]
    """of each layer's tensors"""
    for tensor in tensors:
        found = _LAYER.match(tensor.name)
        if tensor.shape and found and int(found[1]) < num_layers:
            shapes[int(found[1])][found[2].removesuffix(".weight")] = tensor.shape
    attention = max((layer["attn_output"][0] for layer in shapes if "attn_output" in layer), default=0)
    usual = number(Keys.LLM.EMBEDDING_LENGTH) // heads if heads else attention
    keys, values = (number(key) or usual for key in (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH))
    kv_heads = number(Keys.Attention.HEAD_COUNT_KV) if heads else 0
    num_cached = num_layers - number(Keys.Attention.SHARED_KV_LAYERS)
    period = number(Keys.Attention.SLIDING_WINDOW_PATTERN) or _WINDOW_PERIODS.get(arch, 0)
    layers = []
    for i, layer in enumerate(shapes):
        if i >= num_cached:
            layers.append(Layer())
            continue
        # Where the file's own pattern is a list, all are taken to have one: the least that it can be.
        has_window = number(Keys.Attention.SLIDING_WINDOW) > 0 and (not period or i % period < period - 1)
        layers.append(Layer(*_kept(layer, kv_heads * keys, kv_heads * values), has_window))
    return Layout(
        name=name,
        tensors={tensor.name: tensor.num_bytes or 0 for tensor in tensors},
        layers=layers,
        num_heads=number(Keys.LLM.NEXTN_PREDICT_LAYERS),
        attention=attention,
        attention_heads=attention // values if values else 0,
        head_widths=(keys, values),
    )


def _kept(shapes: Mapping[str, tuple[int, ...]], keys: int, values: int) -> tuple[int, int]:
    """How many values of K and V a layer with tensors of these shapes keeps of a token; `keys` and `values`
    where one tensor holds both."""
    if "attn_k_b" in shapes:  # compressed (MLA): V is computed from what is kept as K
        return shapes.get("attn_kv_a_mqa", (0,))[-1], 0
    if "attn_k" in shapes:
        return shapes["attn_k"][-1], shapes.get("attn_v", shapes["attn_k"])[-1]
    is_recurrent = any(name.startswith(("ssm_", "time_mix", "shortconv")) for name in shapes)
    return (keys, values) if "attn_qkv" in shapes and not is_recurrent else (0, 0)
