"""What a model's header says of its size: bytes of its tensors, and what each layer keeps of a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.models.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys
from outrider.models.header import Array, Header, TensorInfo, read_header
from outrider.models.reference import local_shards

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
class ModelSizes:
    """Of a model: bytes of each tensor, its layers, and its widths.

    The last `num_heads` of the layers predict tokens after the next one (MTP). `width` is of the hidden
    states, `attention` of all heads of attention; `head_widths` are those of one head in K and in V.
    """

    name: str
    tensors: Mapping[str, int]
    layers: Sequence[Layer]
    num_heads: int = 0
    window_tokens: int = 0
    vocabulary: int = 0
    trained_context: int = 0
    width: int = 0
    attention: int = 0
    attention_heads: int = 0
    head_widths: tuple[int, int] = (0, 0)


def read_sizes(path: Path) -> ModelSizes:
    """The sizes of a model, in however many files. Raises ModelFileError."""
    headers = [read_header(file) for file in local_shards(path)]
    tensors = [tensor for header in headers for tensor in header.tensors]
    return _Reader(headers[0], tensors).sizes(path.stem)


class _Reader:
    def __init__(self, header: Header, tensors: Sequence[TensorInfo]) -> None:
        self._header = header
        self._arch = header.text(Keys.General.ARCHITECTURE) or ""
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        """of each layer's tensors"""
        for tensor in tensors:
            if tensor.shape and (found := _LAYER.match(tensor.name)):
                self._shapes.setdefault(int(found[1]), {})[found[2].removesuffix(".weight")] = tensor.shape
        self._window = self._number(Keys.Attention.SLIDING_WINDOW)
        usual = _WINDOW_PERIODS.get(self._arch, 0)
        self._period = self._number(Keys.Attention.SLIDING_WINDOW_PATTERN) or usual

    def _number(self, key: str) -> int:
        return self._header.number(key.format(arch=self._arch)) or 0

    def sizes(self, name: str) -> ModelSizes:
        num_layers, heads = self._number(Keys.LLM.BLOCK_COUNT), self._number(Keys.Attention.HEAD_COUNT)
        num_cached = num_layers - self._number(Keys.Attention.SHARED_KV_LAYERS)
        width = self._number(Keys.LLM.EMBEDDING_LENGTH)
        embedding = self._tensors.get("token_embd.weight")
        shapes = [shape for layer in self._shapes.values() for shape in layer.items()]
        attention = max((shape[0] for name, shape in shapes if name == "attn_output"), default=0)
        usual = width // heads if heads else attention
        keys, head = (
            self._number(key) or usual for key in (Keys.Attention.KEY_LENGTH, Keys.Attention.VALUE_LENGTH)
        )
        return ModelSizes(
            name=name,
            tensors={name: tensor.num_bytes or 0 for name, tensor in self._tensors.items()},
            layers=[self._layer(i) if i < num_cached else Layer() for i in range(num_layers)],
            num_heads=self._number(Keys.LLM.NEXTN_PREDICT_LAYERS),
            window_tokens=self._window,
            vocabulary=embedding.shape[-1] if embedding and embedding.shape else self._num_tokens(),
            trained_context=self._number(Keys.LLM.CONTEXT_LENGTH),
            width=width,
            attention=attention,
            attention_heads=attention // head if head else 0,
            head_widths=(keys, head),
        )

    def _num_tokens(self) -> int:
        tokens = self._header.fields.get(Keys.Tokenizer.LIST)
        return tokens.length if isinstance(tokens, Array) else 0

    def _layer(self, index: int) -> Layer:
        shapes = self._shapes.get(index, {})
        is_recurrent = any(name.startswith(("ssm_", "time_mix", "shortconv")) for name in shapes)
        keys = values = 0
        if "attn_k_b" in shapes:  # compressed (MLA): V is computed from what is kept as K
            keys = shapes.get("attn_kv_a_mqa", (0,))[-1]
        elif "attn_k" in shapes:
            keys, values = shapes["attn_k"][-1], shapes.get("attn_v", shapes["attn_k"])[-1]
        elif "attn_qkv" in shapes and not is_recurrent:
            kv_heads, heads = map(self._number, (Keys.Attention.HEAD_COUNT_KV, Keys.Attention.HEAD_COUNT))
            usual = self._number(Keys.LLM.EMBEDDING_LENGTH) // heads if heads else 0
            keys = kv_heads * (self._number(Keys.Attention.KEY_LENGTH) or usual)
            values = kv_heads * (self._number(Keys.Attention.VALUE_LENGTH) or usual)
        # Where the file's own pattern is a list, all are taken to have one: the least that it can be.
        has_window = self._window > 0 and (not self._period or index % self._period < self._period - 1)
        return Layer(keys, values, has_window)
