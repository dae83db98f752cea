"""Models in the layout of Hugging Face's repositories: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError, SettingError
from outrider.distill.checkpoint import Array, Checkpoint, check_weights
from outrider.distill.hugging_face_config import CLASSES, config_of, shape_of
from outrider.distill.safetensors import DataType, read_tensors, write_tensors
from outrider.distill.subset import OTHER
from outrider.distill.tokenizer_fields import token_spellings

__all__ = ["read_safetensors", "write_safetensors"]

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
