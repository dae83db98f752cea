"""A model's shape and weights as plain arrays, read from GGUF.

Weights are float32 whatever the file holds. Query and key matrices are in the layout of Hugging Face's
models, where the two halves of a head are rotated against each other; GGUF files of the "llama"
architecture hold them interleaved instead, and are converted on the way in and out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.constants import Keys
from gguf.quants import dequantize

from outrider.core.errors import ModelFileError
from outrider.models.header import Field, Header, fields_of, read_header
from outrider.models.vocab.subset import Subset

Array = npt.NDArray[np.float32]

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those whose forward pass is known here: attention with rotary positions, gated feed-forward, RMS norms."""
_ANOTHER = "Start from another model with the same tokenizer."
SHAPE_KEYS = {
    "layers": Keys.LLM.BLOCK_COUNT,
    "width": Keys.LLM.EMBEDDING_LENGTH,
    "heads": Keys.Attention.HEAD_COUNT,
    "kv_heads": Keys.Attention.HEAD_COUNT_KV,
    "head_width": Keys.Attention.KEY_LENGTH,
    "feed_forward": Keys.LLM.FEED_FORWARD_LENGTH,
    "context_length": Keys.LLM.CONTEXT_LENGTH,
    "rope_base": Keys.Rope.FREQ_BASE,
    "norm_epsilon": Keys.Attention.LAYERNORM_RMS_EPS,
}
"""Fields of a shape, and their keys in GGUF's metadata"""


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
    metadata: Mapping[str, Field]
    """the fields of the file about its tokenizer, name and licence, for an export"""

    @property
    def licence(self) -> str | None:
        """As the file names it, for instance "apache-2.0"."""
        field = self.metadata.get(Keys.General.LICENSE)
        return None if field is None else field.text

    def with_weights(self, shape: Shape, weights: Mapping[str, Array]) -> Checkpoint:
        """The same tokenizer with another model."""
        return replace(self, shape=shape, weights=weights)


def keep_layers(model: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The model with these of its layers alone, in this order."""
    kept = {name: values for name, values in model.weights.items() if not name.startswith("blk.")}
    for new, old in enumerate(layers):
        prefix = f"blk.{old}."
        for name, values in model.weights.items():
            if name.startswith(prefix):
                kept[f"blk.{new}.{name.removeprefix(prefix)}"] = values
    return model.with_weights(replace(model.shape, layers=len(layers)), kept)


def restrict(model: Checkpoint, subset: Subset) -> Checkpoint:
    """The model with the tokens of a subset alone; `<|other|>` starts as the mean of all others."""
    if not subset.has_other:
        return model
    weights = dict(model.weights)
    known = subset.to_target[:-1]
    for name in weights.keys() & {"token_embd.weight", "output.weight"}:
        others = np.delete(weights[name], known, axis=0).mean(axis=0, keepdims=True)
        weights[name] = np.concatenate([weights[name][known], others])
    return model.with_weights(replace(model.shape, vocabulary=subset.size), weights)


def read_gguf(path: Path) -> Checkpoint:
    """The model of a GGUF file (one that is not split), dequantized.

    Raises ModelFileError when it is missing, damaged, split, or of an architecture that is not known here.
    """
    header = read_header(path)
    if (header.number(Keys.Split.LLM_KV_SPLIT_COUNT) or 1) > 1:
        reason = "its weights are in several files"
        raise ModelFileError(str(path), reason, "Join them: llama-gguf-split --merge.")
    try:
        reader = GGUFReader(path)
        shape = _shape_of(path, header)
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
    _check_weights(path, shape, weights)
    weights = {name: rotation_layout(name, w, shape, to_gguf=False) for name, w in weights.items()}
    return Checkpoint(shape, weights, fields_of(path, header, ("tokenizer.", "general.")))


def _shape_of(path: Path, header: Header) -> Shape:
    """Raises ModelFileError for an architecture that is not known here, and for what is no number above 0."""
    architecture = header.fields.get(Keys.General.ARCHITECTURE, "")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        reason = f"the architecture {architecture!r} cannot be trained here (known: {known})"
        raise ModelFileError(str(path), reason, _ANOTHER)

    def field(key: str, default: Any = None) -> Any:
        return header.fields.get(key.format(arch=architecture), default)

    def number(name: str, default: float | None = None) -> float:
        key, value = SHAPE_KEYS[name], field(SHAPE_KEYS[name], default)
        if value is None:
            raise ModelFileError(str(path), f"it lacks {key.format(arch=architecture)}", "Download it again.")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            reason = f"its {key.format(arch=architecture)} is {value!r}, not a number above 0"
            raise ModelFileError(str(path), reason, _ANOTHER)
        return float(value) if name in ("rope_base", "norm_epsilon") else int(value)

    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelFileError(str(path), "it lacks token_embd.weight", "Download it again.")
    usual = {"rope_base": 10_000.0, "kv_heads": number("heads")}
    usual["head_width"] = number("width") // number("heads")
    values: dict[str, Any] = {name: number(name, usual.get(name)) for name in SHAPE_KEYS}
    shape = Shape(architecture=architecture, vocabulary=embedding.shape[-1], **values)
    is_scaled = any(tensor.name == "rope_freqs.weight" for tensor in header.tensors)
    if field(Keys.Rope.SCALING_TYPE, "none") != "none" or is_scaled:
        reason = "its rotary positions are scaled, which cannot be trained here"
        raise ModelFileError(str(path), reason, _ANOTHER)
    if field(Keys.Rope.DIMENSION_COUNT, shape.head_width) != shape.head_width:
        reason = "a part of each head is rotated, which cannot be trained here"
        raise ModelFileError(str(path), reason, _ANOTHER)
    return shape


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


def _check_weights(path: Path, shape: Shape, weights: Mapping[str, Array]) -> None:
    """Raise ModelFileError where weights of a file are missing, of another size than the shape says, or not
    known here. Biases of matrices and an output layer may be there."""
    way_out = "Choose a whole model of this kind."
    if shape.heads % shape.kv_heads or shape.head_width % 2 or shape.layers > len(weights):
        reason = "its header speaks of heads that cannot be shared, or of more layers than there are"
        raise ModelFileError(str(path), reason, way_out)
    needed = tensor_sizes(shape)
    possible = needed | {"output.weight": needed["token_embd.weight"]}
    for name, size in needed.items():
        if len(size) == 2 and name.startswith("blk."):
            possible[f"{name.removesuffix('weight')}bias"] = size[:1]
    if missing := needed.keys() - weights.keys():
        raise ModelFileError(str(path), f"it lacks {len(missing)} tensors, {min(missing)} first", way_out)
    for name, values in weights.items():
        if name not in possible:
            reason = f"it has {name}, and models with that cannot be trained here"
            raise ModelFileError(str(path), reason, _ANOTHER)
        if values.shape != possible[name]:
            reason = f"{name} has the size {values.shape}, and its header says {possible[name]}"
            raise ModelFileError(str(path), reason, way_out)


def rotation_layout(name: str, values: Array, shape: Shape, *, to_gguf: bool) -> Array:
    """A query or key matrix (or bias) as the architecture's GGUF files hold it, or from there in the layout
    of halves; others as they are."""
    part = name.split(".")[-2] if shape.architecture == "llama" else ""
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(part)
    if heads is None:
        return values
    half = shape.head_width // 2
    split = values.reshape((heads, 2, half, -1) if to_gguf else (heads, half, 2, -1))
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
