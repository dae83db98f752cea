"""The draft before training: which tokens it knows, and its first weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core.contracts import Vocabulary
from outrider.core.errors import SettingError
from outrider.distill.checkpoint import Checkpoint, read_gguf
from outrider.distill.examples import Example
from outrider.distill.export import read_subset
from outrider.distill.hugging_face import read_safetensors
from outrider.distill.plan import USUAL_VOCABULARY, DraftPlan
from outrider.distill.shapes import keep_layers, kept_layers, narrow, random_weights, relearned, restrict
from outrider.distill.subset import Subset, choose_subset

__all__ = ["first_draft"]


def first_draft(
    target: Checkpoint, plan: DraftPlan, examples: Sequence[Example], vocabulary: Vocabulary, seed: int
) -> tuple[Checkpoint, Subset]:
    """The untrained draft that a plan asks for, and the tokens it knows.

    Raises ModelFileError and SettingError for a base that cannot be read or does not go with the target.
    """
    size = USUAL_VOCABULARY if plan.vocabulary is None else plan.vocabulary
    if plan.start == "continue":
        draft, known = _continued(target, plan, vocabulary)
        if plan.vocabulary is None:
            return draft, known
        subset = _chosen(vocabulary, examples, size)
        return relearned(draft, known, subset, target), subset
    base = target if plan.base is None else _read(plan, target)
    _check_vocabulary(plan, base, vocabulary.size)
    subset = _chosen(vocabulary, examples, size)
    if plan.start == "random":
        wide = plan.feed_forward or base.shape.feed_forward
        shape = replace(base.shape, layers=plan.layers, feed_forward=wide, vocabulary=subset.size)
        return random_weights(base, shape, seed), subset
    kept = keep_layers(base, kept_layers(base.shape.layers, plan.layers))
    if plan.feed_forward is not None:
        kept = narrow(kept, plan.feed_forward)
    return restrict(kept, subset), subset


def _continued(target: Checkpoint, plan: DraftPlan, vocabulary: Vocabulary) -> tuple[Checkpoint, Subset]:
    """A draft as it is, with the tokens that it knows."""
    draft = _read(plan, target)
    if plan.base is not None and plan.base.is_file() and plan.base.suffix != ".safetensors":
        subset = read_subset(plan.base, vocabulary)
        if subset is not None:
            return draft, subset
    _check_vocabulary(plan, draft, vocabulary.size)
    return draft, Subset.whole(vocabulary.size)


def _chosen(vocabulary: Vocabulary, examples: Sequence[Example], size: int) -> Subset:
    """The tokens that the answers use most, `size` of them with `<|other|>`; 0: all."""
    if not size:
        return Subset.whole(vocabulary.size)
    return choose_subset(vocabulary, _uses(examples, vocabulary.size), size)


def _read(plan: DraftPlan, target: Checkpoint) -> Checkpoint:
    assert plan.base is not None
    if plan.base.is_dir() or plan.base.suffix == ".safetensors":
        return read_safetensors(plan.base, target)
    return read_gguf(plan.base)


def _check_vocabulary(plan: DraftPlan, draft: Checkpoint, size: int) -> None:
    if draft.shape.vocabulary != size:
        reason = f"it knows {draft.shape.vocabulary} tokens, the target {size}"
        raise SettingError(str(plan.base), reason, "Start from a model with the target's own tokenizer.")


def _uses(examples: Sequence[Example], size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often the target's answers use each token."""
    counts = np.zeros(size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.answer, minlength=size)
    return counts
