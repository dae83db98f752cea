"""A model's shape and weights as plain arrays, read from GGUF.

Weights are float32 whatever the file holds. Query and key matrices are in the layout of Hugging Face's
models, where the two halves of a head are rotated against each other; GGUF files of the "llama"
architecture hold them interleaved instead, and are turned on the way in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderField
from gguf.constants import Keys
from gguf.quants import dequantize

from outrider.core.errors import ModelFileError
from outrider.models.header import read_header

Array = npt.NDArray[np.float32]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those whose forward pass is known here: attention with rotary positions, gated feed-forward, RMS norms."""

_INTERLEAVED = ("llama",)
_PREFIXES = ("tokenizer.", "general.")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Llama-like model is made of; lengths are in numbers, `context_length` in tokens."""

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    @property
    def parameters(self) -> int:
        """Numbers in the matrices of one token's pass, the output layer counted once."""
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.feed_forward
        return self.layers * layer + self.vocabulary * self.width


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights by their GGUF names (outputs before inputs), and the metadata that goes with the tokenizer.

    Without "output.weight" the output layer is "token_embd.weight".
    """

    shape: Shape
    weights: Mapping[str, Array]
    metadata: Mapping[str, ReaderField]
    """the fields of the file about its tokenizer, name and licence, for an export"""

    @property
    def licence(self) -> str | None:
        """As the file names it, for instance "apache-2.0"."""
        field = self.metadata.get(Keys.General.LICENSE)
        return None if field is None else str(field.contents())

    def with_weights(self, shape: Shape, weights: Mapping[str, Array]) -> Checkpoint:
        """The same tokenizer with another model."""
        return replace(self, shape=shape, weights=weights)


def read_gguf(path: Path) -> Checkpoint:
    """The model of a GGUF file (one that is not split), dequantized.

    Raises ModelFileError when it is missing, damaged, split, or of an architecture that is not known here.
    """
    header = read_header(path)
    if (header.number(Keys.Split.LLM_KV_SPLIT_COUNT) or 1) > 1:
        raise ModelFileError(
            str(path), "its weights are in several files", "Join them: llama-gguf-split --merge."
        )
    try:
        reader = GGUFReader(path)
        shape = _shape(path, reader)
        # A copy: what needs no conversion would be a view of the file.
        weights = {
            tensor.name: np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(
                [int(size) for size in reversed(tensor.shape)]
            )
            for tensor in reader.tensors
        }
    except (ValueError, NotImplementedError) as error:
        reason = f"its weights cannot be read here ({error})"
        raise ModelFileError(str(path), reason, "Get it in another quantization.") from error
    check_weights(path, shape, weights)
    if shape.architecture in _INTERLEAVED:
        weights = {name: _halves(name, values, shape) for name, values in weights.items()}
    kept = {name: field for name, field in reader.fields.items() if name.startswith(_PREFIXES)}
    return Checkpoint(shape, weights, kept)


def _shape(path: Path, reader: GGUFReader) -> Shape:
    architecture = str(_value(reader, Keys.General.ARCHITECTURE, path))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        reason = f"the architecture {architecture!r} cannot be trained here (known: {known})"
        raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")

    def number(key: str, default: float | None = None) -> float:
        value = _value(reader, key.format(arch=architecture), path, default)
        if not isinstance(value, int | float) or not value > 0:
            reason = f"{key.format(arch=architecture)} is no number above 0"
            raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")
        return value

    scaling = _value(reader, Keys.Rope.SCALING_TYPE.format(arch=architecture), path, "none")
    if scaling != "none" or any(t.name == "rope_freqs.weight" for t in reader.tensors):
        reason = "its rotary positions are scaled, which cannot be trained here"
        raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")
    heads, width = int(number(Keys.Attention.HEAD_COUNT)), int(number(Keys.LLM.EMBEDDING_LENGTH))
    embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelFileError(str(path), "it has no token_embd.weight", "Choose a whole model.")
    head_width = int(number(Keys.Attention.KEY_LENGTH, width // heads))
    if number(Keys.Rope.DIMENSION_COUNT, head_width) != head_width:
        reason = "a part of each head is rotated, which cannot be trained here"
        raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")
    return Shape(
        architecture=architecture,
        layers=int(number(Keys.LLM.BLOCK_COUNT)),
        width=width,
        heads=heads,
        kv_heads=int(number(Keys.Attention.HEAD_COUNT_KV, heads)),
        head_width=head_width,
        feed_forward=int(number(Keys.LLM.FEED_FORWARD_LENGTH)),
        vocabulary=int(embedding.shape[1]),
        context_length=int(number(Keys.LLM.CONTEXT_LENGTH)),
        rope_base=float(number(Keys.Rope.FREQ_BASE, 10_000.0)),
        norm_epsilon=float(number(Keys.Attention.LAYERNORM_RMS_EPS)),
    )


def _value(reader: GGUFReader, key: str, path: Path, default: Any = None) -> Any:
    field = reader.fields.get(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelFileError(str(path), f"its header lacks {key}", "Download it again.")
    return default


def tensor_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of the weights that a model of this shape must have."""
    inner, outer = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    width, units = shape.width, shape.feed_forward
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (inner, width), "attn_k": (outer, width), "attn_v": (outer, width),
        "attn_output": (width, inner), "ffn_gate": (units, width), "ffn_up": (units, width),
        "ffn_down": (width, units), "attn_norm": (width,), "ffn_norm": (width,),
    }  # fmt: skip
    if shape.architecture == "qwen3":
        layer |= {"attn_q_norm": (shape.head_width,), "attn_k_norm": (shape.head_width,)}
    sizes = {"token_embd.weight": (shape.vocabulary, width), "output_norm.weight": (width,)}
    for number in range(shape.layers):
        sizes |= {f"blk.{number}.{name}.weight": size for name, size in layer.items()}
    return sizes


def check_weights(path: Path, shape: Shape, weights: Mapping[str, Array]) -> None:
    """Raise ModelFileError where weights of a file are missing, of another size than the shape says, or not
    known here. Biases of matrices and an output layer may be there."""
    way_out = "Choose a whole model of this kind."
    if shape.heads % shape.kv_heads or shape.head_width % 2 or shape.layers > len(weights):
        reason = "its header speaks of heads that cannot be shared, or of more layers than there are"
        raise ModelFileError(str(path), reason, way_out)
    needed = tensor_sizes(shape)
    biases = {
        f"{name.removesuffix('weight')}bias": size[:1] for name, size in needed.items() if len(size) == 2
    }
    possible = needed | biases | {"output.weight": needed["token_embd.weight"]}
    del possible["token_embd.bias"]
    if missing := needed.keys() - weights.keys():
        raise ModelFileError(str(path), f"it lacks {len(missing)} tensors, {min(missing)} first", way_out)
    for name, values in weights.items():
        if name not in possible:
            reason = f"it has {name}, and models with that cannot be trained here"
            raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")
        if values.shape != possible[name]:
            reason = f"{name} has the size {values.shape}, and its header says {possible[name]}"
            raise ModelFileError(str(path), reason, way_out)


def _halves(name: str, values: Array, shape: Shape) -> Array:
    """A query or key matrix (or bias) from the interleaved layout to that of halves; others as they are."""
    heads = _rotated_heads(name, shape)
    if not heads:
        return values
    turned = values.reshape(heads, shape.head_width // 2, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(turned.reshape(values.shape))


def interleaved(name: str, values: Array, shape: Shape) -> Array:
    """A query or key matrix (or bias) as a GGUF file of the shape's architecture holds it."""
    heads = _rotated_heads(name, shape) if shape.architecture in _INTERLEAVED else 0
    if not heads:
        return values
    turned = values.reshape(heads, 2, shape.head_width // 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(turned.reshape(values.shape))


def _rotated_heads(name: str, shape: Shape) -> int:
    if ".attn_q." in name:
        return shape.heads
    return shape.kv_heads if ".attn_k." in name else 0
