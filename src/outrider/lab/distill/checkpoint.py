"""A Llama-like model as plain arrays, as GGUF files hold it but in 32 bits: read from one, and written as
one, with what to expect of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf.constants import Keys
from gguf.quants import dequantize

from outrider.backends.gguf.quantizer import quantize, read_type
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.files import check_writable
from outrider.costs import CallCosts
from outrider.lab.model_file import Tensor, check_tokens, read_tensors, write_model_file
from outrider.models.header import Field, Header, fields_of
from outrider.models.reference import local_shards
from outrider.models.vocab.subset import Subset, part_fields, tokenizer_fields
from outrider.policy.state import CALIBRATION_KEY, PolicyState, PretrainedCalibration

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
Provenance = Mapping[str, str | int]
_PREFIX = "outrider.distill."
_LICENCE_KEYS = (Keys.General.LICENSE, Keys.General.LICENSE_NAME, Keys.General.LICENSE_LINK)
"""carried over from the model that its layers are of"""


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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights by their GGUF names (outputs before inputs), and the fields of the file about its tokenizer,
    name and licence. Without "output.weight" the output layer is "token_embd.weight"."""

    shape: Shape
    weights: Mapping[str, Array]
    metadata: Mapping[str, Field]

    def with_weights(self, shape: Shape, weights: Mapping[str, Array]) -> Checkpoint:
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


# Reading


def read_gguf(path: Path) -> Checkpoint:
    """Raises ModelFileError when it is missing, damaged, or of an architecture that is not known here."""
    header, tensors = read_tensors(path)
    shape = _shape_of(path, header, tensors)
    weights: dict[str, Array] = {}
    try:
        for name, tensor in tensors.items():
            # A copy: what needs no conversion would be a view of the file.
            weights[name] = np.array(dequantize(tensor.rows, tensor.kind), np.float32).reshape(tensor.shape)
    except (NotImplementedError, ValueError) as error:
        reason = f"its weights cannot be read here ({error})"
        raise ModelFileError(str(path), reason, "Get it in another quantization.") from error
    return Checkpoint(shape, weights, fields_of(local_shards(path)[0], header, ("tokenizer.", "general.")))


def _shape_of(path: Path, header: Header, tensors: Mapping[str, Tensor]) -> Shape:
    """Raises ModelFileError where it cannot be trained here, or the tensors are not those of a shape."""
    architecture = header.text(Keys.General.ARCHITECTURE) or ""
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        reason = f"the architecture {architecture!r} cannot be trained here (known: {known})"
        raise ModelFileError(str(path), reason, _ANOTHER)
    fields = {name: header.fields.get(key.format(arch=architecture)) for name, key in SHAPE_KEYS.items()}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    try:
        heads = {"kv_heads": given["heads"], "head_width": given["width"] // given["heads"]}
        values = {"rope_base": 10_000.0} | heads | given
        rows = tensors["token_embd.weight"].shape[0]
        shape = Shape(architecture=architecture, vocabulary=rows, **values)
        sizes = tensor_sizes(shape) if 0 < shape.layers <= len(tensors) else {}
    except (KeyError, TypeError, ZeroDivisionError):
        sizes = {}
    if not sizes:
        raise ModelFileError(str(path), "its header does not say what the model is made of", _ANOTHER)
    for key, usual, what in (
        (Keys.Rope.SCALING_TYPE, "none", "its rotary positions are scaled"),
        (Keys.Rope.DIMENSION_COUNT, shape.head_width, "a part of each head is rotated"),
    ):
        if header.fields.get(key.format(arch=architecture), usual) != usual:
            raise ModelFileError(str(path), f"{what}, which cannot be trained here", _ANOTHER)
    _check_tensors(path, tensors, sizes)
    return shape


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], needed: Mapping[str, tuple[int, ...]]) -> None:
    """Biases of matrices and an output layer may be there."""
    possible = {**needed, "output.weight": needed["token_embd.weight"]}
    for name, size in needed.items():
        if len(size) == 2 and name.startswith("blk."):
            possible[f"{name.removesuffix('weight')}bias"] = size[:1]
    for name in (*needed, *tensors):
        if name not in tensors:
            reason = f"it lacks {name}"
        elif name not in possible:
            reason = f"it has {name}, and models with that cannot be trained here"
        elif tensors[name].shape != possible[name]:
            reason = f"{name} has the size {tensors[name].shape}, and its header says {possible[name]}"
        else:
            continue
        raise ModelFileError(str(path), reason, _ANOTHER)


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


# Writing


def write_gguf(
    checkpoint: Checkpoint,
    path: Path,
    *,
    subset: Subset,
    target: Vocabulary,
    provenance: Provenance,
    window: int = 0,
    prior: PretrainedCalibration | None = None,
    quantization: str = "Q4_0",
    embedding_quantization: str = "Q8_0",
) -> None:
    """Write a draft. What is at `path` is replaced once the new file is complete, and llama.cpp has read its
    vocabulary.

    The checkpoint has the metadata of its target or of a draft with the same tokens, those of `target` in
    `subset`. With a reduced vocabulary it reads the last `window` tokens of a text (0: all); `prior` is what
    to expect of its acceptance, `provenance` says by name how it was made: its "teacher" and more. The
    embedding and the output layer have a type of their own.

    Raises SettingError (type, place, room on the disk, weights that are no numbers, a tokenizer that is not
    the target's), VocabularyMismatch, and what `backends.gguf.quantizer.quantize` raises.
    """
    to, ends = read_type(quantization), read_type(embedding_quantization)
    if checkpoint.shape.vocabulary != subset.size or len(subset.to_draft) != target.size:
        reason = f"its {checkpoint.shape.vocabulary:,} tokens are not those of its map ({subset.size:,})"
        raise SettingError("the draft", reason, "Restrict its weights to the same tokens first.")
    fields = tokenizer_fields(checkpoint.metadata, subset, target.size)
    fields |= _own_fields(checkpoint, provenance)
    if subset.has_other:
        fields |= part_fields(subset.to_target.tolist(), target, window=window)
    if prior is not None:
        fields[CALIBRATION_KEY] = _field(json.dumps(prior))
    check_writable(path, "draft")
    with TemporaryDirectory(prefix=".draft-", dir=path.resolve().parent) as folder:
        partial = Path(folder) / path.name
        write_model_file(partial, checkpoint.shape.architecture, fields, _stored(checkpoint))
        check_tokens(partial, target, subset.to_target)
        if to == ends == "F32":
            partial.replace(path.resolve())
        else:
            quantize(partial, to, path, ends=ends, threads=1, force=True)


def pretrained_calibration(
    name: str, answers: Iterable[Sequence[tuple[float, bool]]]
) -> PretrainedCalibration:
    """The calibration by the predictions of the draft model `name` along some answers: for each position, its
    confidence in its most likely token, and whether that was correct."""
    state = PolicyState(CallCosts())
    estimator = state.estimator(name)
    seen: list[float] = []
    for answer in answers:
        text = state.new_request(1, None)
        for confidence, correct in answer:
            evidence, bias = (confidence,), text.biases[name]
            seen.append(estimator.probability(evidence, bias))
            estimator.learn(evidence, bias, correct)
    if seen:
        state.mean_confidence = fmean(seen)
    data = state.as_json()
    # In constrained text, which held-out answers seldom are, its confidence means the same.
    data["estimators"][f"{name} (constrained)"] = {"weights": estimator.weights}
    return data


def _field(value: str | int | float) -> Field:
    """llama.cpp wants its own numbers as 32 bits."""
    if isinstance(value, str):
        return Field(value, GGUFValueType.STRING)
    if isinstance(value, float):
        return Field(value, GGUFValueType.FLOAT32)
    return Field(value, GGUFValueType.UINT32 if value < 2**32 else GGUFValueType.INT64)


def _own_fields(checkpoint: Checkpoint, provenance: Provenance) -> dict[str, Field]:
    shape = checkpoint.shape
    values: dict[str, str | int | float] = {
        Keys.General.NAME: f"{provenance['teacher']} draft",
        Keys.General.FILE_TYPE: int(LlamaFileType.ALL_F32),
        Keys.LLM.VOCAB_SIZE: shape.vocabulary,
        Keys.Attention.VALUE_LENGTH: shape.head_width,
        Keys.Rope.DIMENSION_COUNT: shape.head_width,
    }
    values |= {key: getattr(shape, name) for name, key in SHAPE_KEYS.items()}
    values |= {_PREFIX + name: value for name, value in provenance.items()}
    found = {key.format(arch=shape.architecture): _field(value) for key, value in values.items()}
    return found | {key: checkpoint.metadata[key] for key in _LICENCE_KEYS if key in checkpoint.metadata}


def _stored(checkpoint: Checkpoint) -> dict[str, Tensor]:
    found = {}
    for name, weights in checkpoint.weights.items():
        if not (abs(weights) <= np.finfo(np.float16).max).all():
            reason = f"{name} holds numbers that are infinite, none at all, or too large for 16 bits"
            raise SettingError("the draft", reason, "Train it again with a lower learning rate.")
        found[name] = Tensor(weights.shape, GGMLQuantizationType.F32, np.ascontiguousarray(weights))
    return found
