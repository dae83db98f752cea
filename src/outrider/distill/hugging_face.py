"""Models in the layout of Hugging Face's repositories: config.json and safetensors."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import Keys
from gguf.quants import dequantize, quantize

from outrider.core.errors import ModelFileError, SettingError
from outrider.distill.checkpoint import ARCHITECTURES, Array, Checkpoint, Shape, check_weights
from outrider.distill.subset import OTHER, read_field, token_spellings

DataType = Literal["F32", "F16", "BF16"]

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000
"""what readers of the format allow"""
_AGAIN = "Download it again."


def write_tensors(path: Path, tensors: Mapping[str, Array], kind: DataType) -> None:
    """Write the tensors as numbers of one type. Raises SettingError for what it cannot hold, and OSError."""
    ends = list(accumulate(values.size * _BYTES[kind] for values in tensors.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, values), end in zip(tensors.items(), ends, strict=True):
        offsets = [end - values.size * _BYTES[kind], end]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, values in tensors.items():
            with np.errstate(over="ignore"):
                stored = quantize(np.ascontiguousarray(values), GGMLQuantizationType[kind])
            if not np.isfinite(values).all() or (kind == "F16" and not np.isfinite(stored).all()):
                reason = f"{name} holds numbers that are infinite, none at all, or too large for {kind}"
                raise SettingError("the draft", reason, "Train it anew with a lower learning rate.")
            file.write(stored.tobytes())


def read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """The tensors of a file, one after the other, in 32 bits. Raises ModelFileError when it is missing,
    damaged, or holds other types than F32, F16 and BF16."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(str(path), "it is no safetensors file, or is cut short", _AGAIN)
            header = _header(path, file.read(length))
            for name, entry in header.items():
                start, end, kind, shape = _place(path, name, entry, size - 8 - length)
                file.seek(8 + length + start)
                yield name, _decoded(file.read(end - start), kind).reshape(shape)
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ModelFileError(str(path), reason, "Check the path.") from error


def _header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(str(path), f"its header is no JSON ({error})", _AGAIN) from error
    if not isinstance(header, dict):
        raise ModelFileError(str(path), "its header is no JSON object", _AGAIN)
    header.pop("__metadata__", None)
    return header


def _place(path: Path, name: str, entry: Any, size: int) -> tuple[int, int, str, list[int]]:
    """Where a tensor's numbers lie after the header, their type, and its shape."""
    try:
        kind, shape, (start, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
        counts = (*shape, start, end)
        is_sound = all(isinstance(n, int) and n >= 0 for n in counts) and start <= end <= size
    except (KeyError, TypeError, ValueError):
        raise ModelFileError(str(path), f"its entry for {name!r} is damaged", _AGAIN) from None
    if not isinstance(kind, str) or kind not in _BYTES:
        reason = f"{name} is of the type {kind}, and only {', '.join(_BYTES)} can be read"
        raise ModelFileError(str(path), reason, "Get the model without quantization.")
    if not is_sound or end - start != math.prod(shape) * _BYTES[kind]:
        raise ModelFileError(str(path), f"its entry for {name!r} is damaged, or it is cut short", _AGAIN)
    return start, end, kind, shape


def _decoded(data: bytes, kind: str) -> Array:
    values = dequantize(np.frombuffer(data, dtype=np.uint8), GGMLQuantizationType[kind])
    return np.array(values, dtype=np.float32)


CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""What transformers calls the architectures"""
_SHAPE_KEYS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "feed_forward": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "context_length": "max_position_embeddings",
    "rope_base": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
}
"""Fields of a shape, and their keys in config.json"""
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_of(checkpoint: Checkpoint, kind: DataType) -> dict[str, Any]:
    """config.json of a model whose weights are stored as such numbers."""
    shape = checkpoint.shape
    ids = {"bos_token_id": Keys.Tokenizer.BOS_ID, "eos_token_id": Keys.Tokenizer.EOS_ID}
    given = {name: checkpoint.metadata[key] for name, key in ids.items() if key in checkpoint.metadata}
    config: dict[str, Any] = {
        "architectures": [CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        **{key: getattr(shape, field) for field, key in _SHAPE_KEYS.items()},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in checkpoint.weights,
        "torch_dtype": _TYPES[kind],
        "use_cache": True,
        **{name: read_field(field).value for name, field in given.items()},
    }
    if shape.architecture != "qwen2":
        config["attention_bias"] = False
    return config


def shape_of(path: Path, config: Mapping[str, Any]) -> Shape:
    """The shape that a configuration, read from `path`, describes. Raises ModelFileError for a model that is
    not known here."""
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        reason = f"the model type {architecture!r} cannot be trained here (known: {', '.join(ARCHITECTURES)})"
        raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")
    if odd := _unsupported(config):
        reason = f"it sets {odd}, which cannot be trained here"
        raise ModelFileError(str(path), reason, "Start from another model with the same tokenizer.")

    def number(key: str, default: float | None = None) -> float:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise ModelFileError(
                str(path), f"its {key} is {value!r}, not a number above 0", "Download it again."
            )
        return value

    heads, width = int(number("num_attention_heads")), int(number("hidden_size"))
    rope = config.get("rope_parameters")
    defaults: dict[str, float] = {
        "num_key_value_heads": heads,
        "head_dim": 128 if architecture == "qwen3" else width // heads,
        "rope_theta": (rope.get("rope_theta") if isinstance(rope, dict) else None) or 10_000.0,
        "rms_norm_eps": 1e-6,
    }
    values: dict[str, Any] = {}
    for field, key in _SHAPE_KEYS.items():
        value = number(key, defaults.get(key))
        values[field] = float(value) if field in ("rope_base", "norm_epsilon") else int(value)
    return Shape(architecture=architecture, **values)


def _unsupported(config: Mapping[str, Any]) -> str | None:
    """The first setting that changes the forward pass in a way that is not known here."""
    usual: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "quantization_config": (None,),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1, None),
    }
    for key, values in usual.items():
        if config.get(key) not in values:
            return key
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key) or {}
        if (
            not isinstance(scaling, dict)
            or scaling.get("rope_type", scaling.get("type", "default")) != "default"
        ):
            return key
    return None


_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DERIVED = "rotary_emb.inv_freq"
"""Old files hold this, which follows from the configuration."""


def write_safetensors(checkpoint: Checkpoint, folder: Path, kind: DataType = "BF16") -> tuple[str, ...]:
    """Write config.json and model.safetensors, which transformers and other engines load; notes for the user.

    What is in the folder under these names is replaced once both are complete. Raises SettingError for a
    reduced vocabulary, for biases that this layout has no place for, and when the disk is full.
    """
    _check_whole(checkpoint)
    tensors = {_to_hugging_face(name): values for name, values in checkpoint.weights.items()}
    _check_biases(checkpoint)
    contents = json.dumps(config_of(checkpoint, kind), indent=2) + "\n"
    names = {name: folder / f".{name}.{os.getpid()}.partial" for name in (_WEIGHTS, _CONFIG)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(names[_WEIGHTS], tensors, kind)
        names[_CONFIG].write_text(contents, encoding="utf-8")
        for name, partial in names.items():
            partial.replace(folder / name)
    except OSError as error:
        reason = f"the draft could not be written ({(error.strerror or str(error)).lower()})"
        raise SettingError(str(folder), reason, "Free some space, or name another folder.") from error
    finally:
        for partial in names.values():
            partial.unlink(missing_ok=True)
    return ("the tokenizer is the target's: copy its tokenizer*.json files beside config.json",)


def _check_whole(checkpoint: Checkpoint) -> None:
    tokens = token_spellings(checkpoint.metadata)
    if len(tokens) != checkpoint.shape.vocabulary or tokens[-1] == OTHER.encode():
        reason = (
            "a reduced vocabulary needs a map to its target's tokens, which other engines do not know: their "
            "drafts have the target's own tokens"
        )
        raise SettingError("safetensors", reason, "Make a draft of all tokens (vocabulary 0), or GGUF alone.")


def _check_biases(checkpoint: Checkpoint) -> None:
    """Qwen2 has biases on queries, keys and values alone, and always; the others are written without any."""
    usual = ("attn_q", "attn_k", "attn_v") if checkpoint.shape.architecture == "qwen2" else ()
    needed = {f"blk.{n}.{name}.bias" for n in range(checkpoint.shape.layers) for name in usual}
    biases = {name for name in checkpoint.weights if name.endswith(".bias")}
    if odd := biases ^ needed:
        reason = f"{CLASSES[checkpoint.shape.architecture]} and this model differ in biases ({min(odd)})"
        raise SettingError("safetensors", reason, "Write GGUF alone.")


def read_safetensors(path: Path, like: Checkpoint | None = None) -> Checkpoint:
    """The model of a folder (config.json with model.safetensors or its parts), or of one weights file in it.

    `like`: a checkpoint with the same tokenizer, whose metadata is taken over. Rows of the embedding beyond
    its tokens are padding, and are cut. Raises ModelFileError when files are missing, damaged, or of a model
    that is not known here.
    """
    folder = path if path.is_dir() else path.parent
    config = _json(folder / _CONFIG)
    shape = shape_of(folder / _CONFIG, config)
    weights = dict(_weights(path))
    if config.get("tie_word_embeddings", False):
        weights.pop("output.weight", None)
    elif "output.weight" not in weights:
        reason = "it has no lm_head.weight, and its configuration does not tie it to the embedding"
        raise ModelFileError(str(path), reason, "Choose a whole model.")
    check_weights(path, shape, weights)
    if like is None:
        return Checkpoint(shape, weights, {})
    size = like.shape.vocabulary
    if shape.vocabulary < size:
        reason = f"it has {shape.vocabulary:,} tokens, and its target {size:,}"
        raise ModelFileError(str(path), reason, "Choose a model with the target's tokenizer.")
    for name in {"token_embd.weight", "output.weight"} & weights.keys():
        weights[name] = weights[name][:size]
    return like.with_weights(replace(shape, vocabulary=size), weights)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ModelFileError(str(path), reason, "Name a folder with a model's files.") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(str(path), f"it is no JSON ({error})", "Download it again.") from error
    if not isinstance(content, dict):
        raise ModelFileError(str(path), "it is no JSON object", "Download it again.")
    return content


def _weights(path: Path) -> Iterator[tuple[str, Array]]:
    """All tensors, by GGUF's names."""
    for file in _files(path):
        for name, values in read_tensors(file):
            if name.endswith(_DERIVED):
                continue
            known = _from_hugging_face(name)
            if known is None:
                reason = f"it has {name}, and models with that cannot be trained here"
                raise ModelFileError(str(file), reason, "Start from another model with the same tokenizer.")
            yield known, values


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    folder = path if path.is_dir() else path.parent
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    parts = _json(folder / _INDEX).get("weight_map")
    names = set(parts.values()) if isinstance(parts, dict) else set()
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelFileError(str(folder / _INDEX), "it names no files beside it", "Download it again.")
    return [folder / name for name in sorted(names)]


def _to_hugging_face(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_INNER[part]}.{kind}"


def _from_hugging_face(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    for ours, theirs in _OUTER.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    ours = next((ours for ours, theirs in _INNER.items() if inner and theirs == inner[2]), "")
    return f"blk.{int(inner[1])}.{ours}.{kind}" if inner and ours else None
