"""The draft before training: which tokens it knows, and its first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError
from outrider.lab.distill.checkpoint import Array, Checkpoint, Shape, read_gguf, tensor_sizes
from outrider.lab.distill.examples import Example, tokens_used
from outrider.lab.distill.export import read_subset
from outrider.lab.distill.plan import DraftPlan
from outrider.models.vocab.subset import Subset

_ENDS = ("token_embd.weight", "output.weight")


def keep_layers(model: Checkpoint, layers: Sequence[int]) -> Checkpoint:
    """The model with these of its layers alone, in this order."""
    kept = {name: values for name, values in model.weights.items() if not name.startswith("blk.")}
    for new, old in enumerate(layers):
        prefix = f"blk.{old}."
        for name, values in model.weights.items():
            if name.startswith(prefix):
                kept[f"blk.{new}.{name.removeprefix(prefix)}"] = values
    return model.with_weights(replace(model.shape, layers=len(layers)), kept)


def narrow(model: Checkpoint, feed_forward: int) -> Checkpoint:
    """The model with so many units in every feed-forward layer: the most important ones.

    A unit's importance is the product of the norms of its input and output weights; nothing is known of how
    often it is active. Raises SettingError for more units than there are.
    """
    have = model.shape.feed_forward
    if not 1 <= feed_forward <= have:
        reason = f"{feed_forward} units cannot be kept of {have}"
        raise SettingError("feed-forward", reason, f"Give a number from 1 to {have}.")
    weights = dict(model.weights)
    for layer in range(model.shape.layers):
        names = [f"blk.{layer}.ffn_{part}.weight" for part in ("gate", "up", "down")]
        gate, up, down = (weights[name] for name in names)
        norms = (np.linalg.norm(m, axis=axis) for m, axis in ((gate, 1), (up, 1), (down, 0)))
        units = np.sort(np.argsort(-np.prod(list(norms), axis=0), kind="stable")[:feed_forward])
        weights |= zip(names, (gate[units], up[units], down[:, units]), strict=True)
    return model.with_weights(replace(model.shape, feed_forward=feed_forward), weights)


def restrict(model: Checkpoint, subset: Subset) -> Checkpoint:
    """The model with the tokens of a subset alone; `<|other|>` starts as the mean of all others."""
    if not subset.has_other:
        return model
    weights = dict(model.weights)
    known = subset.to_target[:-1]
    for name in weights.keys() & set(_ENDS):
        others = np.delete(weights[name], known, axis=0).mean(axis=0, keepdims=True)
        weights[name] = np.concatenate([weights[name][known], others])
    return model.with_weights(replace(model.shape, vocabulary=subset.size), weights)


def relearned(draft: Checkpoint, known: Subset, subset: Subset, target: Checkpoint) -> Checkpoint:
    """A draft that knows the tokens `known`, with those of `subset` instead.

    What it has not learnt yet starts as the target's rows, scaled to the norm of the draft's rows;
    `<|other|>` stays. The tokenizer is the target's.
    Raises SettingError where the target's rows are of another width.
    """
    weights = dict(draft.weights)
    wanted = subset.to_target[: subset.size - subset.has_other]
    is_known = known.to_draft[wanted] < known.size - known.has_other
    for name in weights.keys() & set(_ENDS):
        rows, theirs = weights[name], target.weights.get(name, target.weights["token_embd.weight"])
        if theirs.shape[1] != rows.shape[1]:
            width = rows.shape[1]
            reason = f"new tokens begin as the target's rows, which are not {width} wide as the draft's"
            raise SettingError("--vocabulary", reason, "Leave it out: the draft keeps the tokens it knows.")
        mine, found = rows[known.to_draft[wanted]], theirs[wanted]
        ratio = np.linalg.norm(mine[is_known]) / np.linalg.norm(found[is_known])
        made = np.where(is_known[:, None], mine, ratio * found)
        if subset.has_other:
            other = rows[-1:] if known.has_other else rows.mean(axis=0, keepdims=True)
            made = np.concatenate([made, other])
        weights[name] = np.asarray(made, dtype=np.float32)
    shape = replace(draft.shape, vocabulary=subset.size)
    return replace(draft.with_weights(shape, weights), metadata=target.metadata)


def random_weights(model: Checkpoint, shape: Shape, seed: int) -> Checkpoint:
    """A model of another shape with random weights, and the tokenizer of `model`.

    Matrices are normal with standard deviation 1 / √inputs, those that add to the residual stream smaller by
    1 / √(2 layers) (GPT-2, section 2.3); norms are 1; input and output embeddings are shared.
    """
    random = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, size in tensor_sizes(shape).items():
        if len(size) == 1:
            weights[name] = np.ones(size, dtype=np.float32)
            continue
        adds = name.endswith(("attn_output.weight", "ffn_down.weight"))
        scale = (2 * shape.layers) ** -0.5 if adds else 1.0
        weights[name] = scale * np.asarray(random.standard_normal(size) * size[1] ** -0.5, dtype=np.float32)
    if shape.architecture == "qwen2":
        for layer in range(shape.layers):
            for name in (f"blk.{layer}.{part}" for part in ("attn_q", "attn_k", "attn_v")):
                weights[f"{name}.bias"] = np.zeros(len(weights[f"{name}.weight"]), dtype=np.float32)

    def layer_of(name: str) -> int:
        return int(name.split(".")[1]) if name.startswith("blk.") else -1

    # By layer: checkpoints hold the optimizer's state in the weights' order.
    return model.with_weights(shape, {name: weights[name] for name in sorted(weights, key=layer_of)})


def _base(target: Checkpoint, plan: DraftPlan, vocabulary: Vocabulary) -> tuple[Checkpoint, Subset | None]:
    """What the draft is made of; of one that is continued the tokens it knows."""
    base, is_gguf = target, True
    if plan.base is not None:
        is_gguf = not (plan.base.is_dir() or plan.base.suffix == ".safetensors")
        if is_gguf:
            base = read_gguf(plan.base)
        else:
            from outrider.lab.distill.hugging_face import read_safetensors  # needs PyTorch

            base = read_safetensors(plan.base, target)
    if plan.start == "continue" and plan.base is not None and is_gguf:
        return base, read_subset(plan.base, vocabulary)
    if base.shape.vocabulary != vocabulary.size:
        reason = f"it knows {base.shape.vocabulary} tokens, the target {vocabulary.size}"
        raise SettingError(str(plan.base), reason, "Start from a model with the target's own tokenizer.")
    return base, Subset.whole(vocabulary.size) if plan.start == "continue" else None


def first_draft(
    target: Checkpoint,
    plan: DraftPlan,
    examples: Sequence[Example],
    vocabulary: Vocabulary,
    seed: int,
    choose: Callable[[Checkpoint, Subset], Sequence[int]],
) -> tuple[Checkpoint, Subset]:
    """The untrained draft that a plan asks for, and the tokens it knows. `choose` says which of a model's
    layers it is made of, given the tokens that the model knows.

    Raises ModelFileError and SettingError for a base that cannot be read or does not go with the target.
    """
    base, known = _base(target, plan, vocabulary)
    if known is not None and plan.vocabulary is None:
        return base, known
    subset = tokens_used(examples, vocabulary, plan.vocabulary)
    if known is not None:
        return relearned(base, known, subset, target), subset
    if plan.start == "random":
        width = plan.feed_forward or base.shape.feed_forward
        shape = replace(base.shape, layers=plan.layers, feed_forward=width, vocabulary=subset.size)
        return random_weights(base, shape, seed), subset
    reduced = restrict(base, subset)
    kept = keep_layers(reduced, choose(reduced, subset))
    return kept if plan.feed_forward is None else narrow(kept, plan.feed_forward), subset
