"""Models in the layout of Hugging Face's repositories: config.json and safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from gguf.constants import Keys
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.core.errors import ModelFileError, SettingError
from outrider.core.files import reason_of
from outrider.lab.distill.checkpoint import ANOTHER, Array, Checkpoint, Shape, check_weights, shape_of
from outrider.models.vocab.subset import OTHER

DataType = Literal["F32", "F16", "BF16"]

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AGAIN = "Download it again."
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
"""GGUF's names of weights, within a layer and outside, and theirs"""
_GGUF_NAMES = {theirs: ours for ours, theirs in _NAMES.items()}
_DERIVED = "rotary_emb.inv_freq"
"""Old files hold this, which follows from the configuration."""


# Writing


def write_safetensors(checkpoint: Checkpoint, folder: Path, kind: DataType = "BF16") -> tuple[str, ...]:
    """Write config.json and model.safetensors, which transformers and other engines load; notes for the user.

    What is in the folder under these names is replaced once both are complete. Raises SettingError for a
    reduced vocabulary, for biases that this layout has no place for, and when the disk is full.
    """
    _check_layout(checkpoint)
    tensors = {}
    for name, values in checkpoint.weights.items():
        theirs = _to_hugging_face(name)
        tensors[theirs] = torch.from_numpy(values).to(_TYPES[kind]).contiguous()
        if not tensors[theirs].isfinite().all():
            reason = f"{theirs} holds numbers that are infinite, none at all, or too large for {kind}"
            raise SettingError("the draft", reason, "Train it again with a lower learning rate.")
    config = json.dumps(_config_of(checkpoint, kind), indent=2) + "\n"
    names = {name: folder / f".{name}.{os.getpid()}.partial" for name in (_WEIGHTS, _CONFIG)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, names[_WEIGHTS], metadata={"format": "pt"})
        names[_CONFIG].write_text(config, encoding="utf-8")
        for name, partial in names.items():
            partial.replace(folder / name)
    except (OSError, SafetensorError) as error:
        reason = f"the draft could not be written ({reason_of(error)})"
        raise SettingError(str(folder), reason, "Free some space, or name another folder.") from error
    finally:
        for partial in names.values():
            partial.unlink(missing_ok=True)
    return ("the tokenizer is the target's: copy its tokenizer*.json files beside config.json",)


def _check_layout(checkpoint: Checkpoint) -> None:
    shape, tokens = checkpoint.shape, checkpoint.metadata.get(Keys.Tokenizer.LIST)
    if tokens is None or len(tokens.value) != shape.vocabulary or tokens.value[-1] == OTHER.encode():
        reason = (
            "a reduced vocabulary needs a map to its target's tokens, which other engines do not know: their "
            "drafts have the target's own tokens"
        )
        raise SettingError("safetensors", reason, "Make a draft of all tokens (vocabulary 0), or GGUF alone.")
    # Qwen2 has biases on queries, keys and values alone, and always; the others are written without any.
    usual = ("attn_q", "attn_k", "attn_v") if shape.architecture == "qwen2" else ()
    needed = {f"blk.{layer}.{name}.bias" for layer in range(shape.layers) for name in usual}
    if odd := needed ^ {name for name in checkpoint.weights if name.endswith(".bias")}:
        reason = f"{_CLASSES[shape.architecture]} and this model differ in biases ({min(odd)})"
        raise SettingError("safetensors", reason, "Write GGUF alone.")


def _config_of(checkpoint: Checkpoint, kind: DataType) -> dict[str, Any]:
    shape = checkpoint.shape
    ids = {"bos_token_id": Keys.Tokenizer.BOS_ID, "eos_token_id": Keys.Tokenizer.EOS_ID}
    given = {name: checkpoint.metadata[key] for name, key in ids.items() if key in checkpoint.metadata}
    return {
        "architectures": [_CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        **{key: getattr(shape, field) for field, key in _SHAPE_KEYS.items()},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in checkpoint.weights,
        "torch_dtype": str(_TYPES[kind]).removeprefix("torch."),
        "use_cache": True,
        **{name: field.value for name, field in given.items()},
        **({} if shape.architecture == "qwen2" else {"attention_bias": False}),
    }


def _to_hugging_face(name: str) -> str:
    *layer, part, kind = name.split(".")
    return ".".join((*(("model", "layers", layer[1]) if layer else ()), _NAMES[part], kind))


# Reading


def read_safetensors(path: Path, like: Checkpoint | None = None) -> Checkpoint:
    """The model of a folder (config.json with model.safetensors or its parts), or of one weights file in it.

    `like`: a checkpoint with the same tokenizer, whose metadata is taken over. Rows of the embedding beyond
    its tokens are padding, and are cut. Raises ModelFileError when files are missing, damaged, or of a model
    that is not known here.
    """
    folder = path if path.is_dir() else path.parent
    config = _json(folder / _CONFIG)
    shape = _config_shape(folder / _CONFIG, config)
    weights = {name: values for file in _files(path) for name, values in _read_tensors(file)}
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


def _config_shape(path: Path, config: Mapping[str, Any]) -> Shape:
    architecture, rope = config.get("model_type"), config.get("rope_parameters")
    defaults = {"norm_epsilon": 1e-6}
    if architecture == "qwen3":
        defaults["head_width"] = 128
    if isinstance(rope, dict) and rope.get("rope_theta"):
        defaults["rope_base"] = rope["rope_theta"]
    found = {field: (key, config.get(key)) for field, key in _SHAPE_KEYS.items()}
    shape = shape_of(path, architecture, found, defaults)
    usual: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "quantization_config": (None,),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1, None),
    }
    odd = [key for key, values in usual.items() if config.get(key) not in values]
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key) or {"type": "default"}
        kind = isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default"))
        odd += [key] if kind != "default" else []
    if odd:
        raise ModelFileError(str(path), f"it sets {odd[0]}, which cannot be trained here", ANOTHER)
    return shape


def _read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """The tensors of a file in 32 bits, by GGUF's names."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name.endswith(_DERIVED):
                    continue
                stem, _, kind = name.rpartition(".")
                inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
                known = _GGUF_NAMES.get(inner[2] if inner else stem)
                if known is None:
                    reason = f"it has {name}, and models with that cannot be trained here"
                    raise ModelFileError(str(path), reason, ANOTHER)
                values = file.get_tensor(name)
                if values.dtype not in _TYPES.values():
                    reason = f"{name} is of the type {values.dtype}, and only {', '.join(_TYPES)} can be read"
                    raise ModelFileError(str(path), reason, "Get the model without quantization.")
                yield f"blk.{inner[1]}.{known}.{kind}" if inner else f"{known}.{kind}", values.float().numpy()
    except FileNotFoundError as error:
        raise ModelFileError(str(path), "no such file or directory", "Check the path.") from error
    except (OSError, SafetensorError) as error:
        raise ModelFileError(str(path), f"it is damaged, or cut short ({error})", _AGAIN) from error


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    folder = path if path.is_dir() else path.parent
    if (folder / _WEIGHTS).exists() or not (folder / _INDEX).exists():
        return [folder / _WEIGHTS]
    parts = _json(folder / _INDEX).get("weight_map")
    names = set(parts.values()) if isinstance(parts, dict) else set()
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelFileError(str(folder / _INDEX), "it names no files beside it", _AGAIN)
    return [folder / name for name in sorted(names)]


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = reason_of(error)
        raise ModelFileError(str(path), reason, "Name a folder with a model's files.") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(str(path), f"it is no JSON ({error})", _AGAIN) from error
    if not isinstance(content, dict):
        raise ModelFileError(str(path), "it is no JSON object", _AGAIN)
    return content
