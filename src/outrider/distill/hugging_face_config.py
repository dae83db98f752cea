"""config.json of Hugging Face's repositories, and a model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from gguf.constants import Keys

from outrider.core.errors import ModelFileError
from outrider.distill.checkpoint import ARCHITECTURES, Checkpoint, Shape
from outrider.distill.safetensors import DataType
from outrider.distill.tokenizer_fields import read_field

__all__ = ["CLASSES", "config_of", "shape_of"]

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""What transformers calls the architectures"""
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def config_of(checkpoint: Checkpoint, kind: DataType) -> dict[str, Any]:
    """config.json of a model whose weights are stored as such numbers."""
    shape = checkpoint.shape
    ids = {"bos_token_id": Keys.Tokenizer.BOS_ID, "eos_token_id": Keys.Tokenizer.EOS_ID}
    given = {name: checkpoint.metadata[key] for name, key in ids.items() if key in checkpoint.metadata}
    config: dict[str, Any] = {
        "architectures": [CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.norm_epsilon,
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
    base = rope.get("rope_theta") if isinstance(rope, dict) else None
    return Shape(
        architecture=architecture,
        layers=int(number("num_hidden_layers")),
        width=width,
        heads=heads,
        kv_heads=int(number("num_key_value_heads", heads)),
        head_width=int(number("head_dim", 128 if architecture == "qwen3" else width // heads)),
        feed_forward=int(number("intermediate_size")),
        vocabulary=int(number("vocab_size")),
        context_length=int(number("max_position_embeddings")),
        rope_base=float(number("rope_theta", base or 10_000.0)),
        norm_epsilon=float(number("rms_norm_eps", 1e-6)),
    )


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
