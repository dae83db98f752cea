"""The first weights of a draft: some layers of a model, narrowed; or random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from outrider.core.errors import SettingError
from outrider.distill.checkpoint import Array, Checkpoint, Shape
from outrider.distill.subset import Subset

__all__ = ["keep_layers", "kept_layers", "narrow", "random_weights", "relearned", "restrict"]

_FEED_FORWARD = ("ffn_gate.weight", "ffn_up.weight")


def kept_layers(layers: int, count: int) -> tuple[int, ...]:
    """Which layers to keep of a model: the first and the last ones, the odd one at the front.

    The first turn tokens into what the others work with, the last turn that into predictions; those between
    resemble each other most.
    """
    if not 1 <= count <= layers:
        raise SettingError(
            "layers", f"{count} of {layers} cannot be kept", f"Give a number from 1 to {layers}."
        )
    first = (count + 1) // 2
    return (*range(first), *range(layers - (count - first), layers))


def keep_layers(model: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The model with these of its layers alone, in this order."""
    kept = {name: values for name, values in model.weights.items() if not name.startswith("blk.")}
    for new, old in enumerate(layers):
        lead = f"blk.{old}."
        for name, values in model.weights.items():
            if name.startswith(lead):
                kept[f"blk.{new}.{name.removeprefix(lead)}"] = values
    return model.with_weights(replace(model.shape, layers=len(layers)), kept)


def narrow(model: Checkpoint, feed_forward: int) -> Checkpoint:
    """The model with so many units in every feed-forward layer: those that weigh most.

    A unit's weight is the product of the lengths of what goes in and what comes out; nothing is known of how
    often it is active. Raises SettingError for more units than there are.
    """
    have = model.shape.feed_forward
    if not 1 <= feed_forward <= have:
        reason = f"{feed_forward} units cannot be kept of {have}"
        raise SettingError("feed-forward", reason, f"Give a number from 1 to {have}.")
    weights = dict(model.weights)
    for layer in range(model.shape.layers):
        lead = f"blk.{layer}."
        gate, up, down = (weights[f"{lead}ffn_{part}.weight"] for part in ("gate", "up", "down"))
        lengths = (np.linalg.norm(m, axis=axis) for m, axis in ((gate, 1), (up, 1), (down, 0)))
        units = np.sort(np.argsort(-np.prod(list(lengths), axis=0), kind="stable")[:feed_forward])
        weights |= {f"{lead}ffn_gate.weight": gate[units], f"{lead}ffn_up.weight": up[units]}
        weights[f"{lead}ffn_down.weight"] = down[:, units]
    return model.with_weights(replace(model.shape, feed_forward=feed_forward), weights)


def restrict(model: Checkpoint, subset: Subset) -> Checkpoint:
    """The model with the tokens of a subset alone; `<|other|>` starts as the mean of those it stands for."""
    if not subset.has_other:
        return model
    weights = dict(model.weights)
    known = subset.to_target[:-1]
    others = np.ones(model.shape.vocabulary, dtype=bool)
    others[known] = False
    for name in ("token_embd.weight", "output.weight"):
        if name in weights:
            rows = weights[name]
            weights[name] = np.concatenate([rows[known], rows[others].mean(axis=0, keepdims=True)])
    return model.with_weights(replace(model.shape, vocabulary=subset.size), weights)


def relearned(draft: Checkpoint, known: Subset, subset: Subset, target: Checkpoint) -> Checkpoint:
    """A draft that knows the tokens `known`, with those of `subset` instead.

    What it has not learnt yet starts as the target's rows, brought to the length that the draft's rows have
    come to; `<|other|>` stays. The tokenizer is the target's.
    Raises SettingError where the target's rows are of another width.
    """
    weights = dict(draft.weights)
    for name in ("token_embd.weight", "output.weight"):
        if name not in weights:
            continue
        rows, theirs = weights[name], target.weights.get(name, target.weights["token_embd.weight"])
        if theirs.shape[1] != rows.shape[1]:
            reason = (
                f"new tokens begin as the target's rows, which are not {rows.shape[1]} wide as the draft's"
            )
            raise SettingError("--vocabulary", reason, "Leave it out: the draft keeps the tokens it knows.")
        both = subset.to_target[: subset.size - subset.has_other]
        found = theirs[both]
        is_known = known.to_draft[both] < known.size - known.has_other
        mine = rows[known.to_draft[both]]
        ratio = np.linalg.norm(mine[is_known]) / np.linalg.norm(found[is_known])
        made = np.where(is_known[:, None], mine, ratio * found)
        if subset.has_other:
            last = rows[-1:] if known.has_other else rows.mean(axis=0, keepdims=True)
            made = np.concatenate([made, last])
        weights[name] = np.asarray(made, dtype=np.float32)
    shape = replace(draft.shape, vocabulary=subset.size)
    return replace(draft.with_weights(shape, weights), metadata=target.metadata)


def random_weights(model: Checkpoint, shape: Shape, seed: int) -> Checkpoint:
    """A model of another shape with random weights, and the tokenizer of `model`.

    Matrices are normal with standard deviation 1 / √inputs, those that add to the stream of states smaller by
    1 / √(2 layers) (GPT-2, section 2.3); norms are 1; input and output embeddings are shared.
    """
    random = np.random.default_rng(seed)
    inner = shape.heads * shape.head_width
    outer = shape.kv_heads * shape.head_width
    matrices = {
        "attn_q": (inner, shape.width), "attn_k": (outer, shape.width), "attn_v": (outer, shape.width),
        "attn_output": (shape.width, inner), "ffn_gate": (shape.feed_forward, shape.width),
        "ffn_up": (shape.feed_forward, shape.width), "ffn_down": (shape.width, shape.feed_forward),
    }  # fmt: skip
    norms: Mapping[str, int] = {"attn_norm": shape.width, "ffn_norm": shape.width}
    if shape.architecture == "qwen3":
        norms = {**norms, "attn_q_norm": shape.head_width, "attn_k_norm": shape.head_width}
    weights: dict[str, Array] = {
        "token_embd.weight": _normal(random, (shape.vocabulary, shape.width)),
        "output_norm.weight": np.ones(shape.width, dtype=np.float32),
    }
    for layer in range(shape.layers):
        for name, size in matrices.items():
            scale = (2 * shape.layers) ** -0.5 if name in ("attn_output", "ffn_down") else 1.0
            weights[f"blk.{layer}.{name}.weight"] = scale * _normal(random, size)
        for name, width in norms.items():
            weights[f"blk.{layer}.{name}.weight"] = np.ones(width, dtype=np.float32)
        if shape.architecture == "qwen2":
            for name, width in (("attn_q", inner), ("attn_k", outer), ("attn_v", outer)):
                weights[f"blk.{layer}.{name}.bias"] = np.zeros(width, dtype=np.float32)
    return model.with_weights(shape, weights)


def _normal(random: np.random.Generator, size: tuple[int, int]) -> Array:
    return np.asarray(random.standard_normal(size) * size[1] ** -0.5, dtype=np.float32)
