"""What tests of drafts in the making share: tiny checkpoints, and what is said after a text."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from llama_cpp_models import SMALL
from outrider.backends.gguf.model import Weights
from outrider.core.data import Logits, Span
from outrider.lab.distill.checkpoint import Array, Checkpoint, Provenance, Shape, tensor_sizes

PROVENANCE: Provenance = {"teacher": "tiny", "data": "3 prompts", "tokens": 5_000_000_000, "seed": 7}


def spoken(path: Path, tokens: list[int]) -> Logits:
    """llama.cpp's logits after each of the tokens."""
    weights = Weights(path, SMALL)
    model = weights.open(64)
    rows = np.array(model.decode([Span(0, tuple(tokens), 0, len(tokens))])[0])
    model.close()
    weights.close()
    return rows


def random_weights(like: Checkpoint, shape: Shape, seed: int) -> Checkpoint:
    """A model of another shape, with the tokenizer of this one; input and output embeddings are shared."""
    random = np.random.default_rng(seed)

    def values(name: str, size: tuple[int, ...]) -> Array:
        if len(size) == 1:
            return np.ones(size, dtype=np.float32)
        # What adds to the residual stream is smaller, as in GPT-2.
        adds = name.endswith(("attn_output.weight", "ffn_down.weight"))
        scale = (2 * shape.layers * size[1] if adds else size[1]) ** -0.5
        return np.asarray(scale * random.standard_normal(size), dtype=np.float32)

    weights = {name: values(name, size) for name, size in tensor_sizes(shape).items()}
    if shape.architecture == "qwen2":
        for name in [name for name in weights if name.split(".")[-2] in ("attn_q", "attn_k", "attn_v")]:
            weights[name.replace(".weight", ".bias")] = np.zeros(len(weights[name]), dtype=np.float32)
    return like.with_weights(shape, weights)


def random_model(like: Checkpoint, architecture: str) -> Checkpoint:
    """A model of another architecture whose norms and biases are random too, so that none goes unnoticed."""
    made = random_weights(like, replace(like.shape, architecture=architecture), seed=3)
    random = np.random.default_rng(4)
    weights = {
        name: values
        if values.ndim > 1
        else (values + 0.3 * random.standard_normal(len(values))).astype(np.float32)
        for name, values in made.weights.items()
    }
    # Of its own, or an untrained model repeats its last token.
    weights["output.weight"] = random.standard_normal(weights["token_embd.weight"].shape).astype(np.float32)
    return made.with_weights(made.shape, weights)
