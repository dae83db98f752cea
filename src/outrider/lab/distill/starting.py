"""What a training begins with: the answers of both sides, the tokens that the draft knows, and its first
weights.

Which layers of a model are best differs much between models and numbers of layers, and so does what is left
without the others: it is tried out on some of the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import cosine_similarity, embedding

from outrider.core.contracts import Vocabulary
from outrider.core.errors import PromptError, SettingError
from outrider.core.notices import notify
from outrider.lab.distill.answers import Asked, Example, read_examples
from outrider.lab.distill.checkpoint import Checkpoint, keep_layers, read_gguf, restrict
from outrider.lab.distill.corpus import Text, acceptance, batch_of, text_of
from outrider.lab.distill.network import Network, device_of
from outrider.lab.distill.plan import USUAL_LAYERS, USUAL_VOCABULARY, DistillPlan
from outrider.models.vocab.subset import Subset, choose_subset

_TEXTS, _TEXT_TOKENS = 12, 128
"""that are judged: enough to tell a good choice from a bad one"""
_DIVISIONS = 8
"""of the layers into first and last ones that are tried, about: neighbours differ little"""


@dataclass(frozen=True, slots=True)
class Material:
    """The untrained draft, the tokens that it knows, and the answers of both sides. It reads the last
    `window` tokens of a prompt, 0: all."""

    draft: Checkpoint
    subset: Subset
    training: list[Example]
    held_out: list[Example]
    window: int

    def texts(self, examples: Sequence[Example], max_tokens: int) -> list[Text]:
        """Answers in the draft's ids after what it reads of their prompts, cut to their last `max_tokens`;
        empty ones are left out."""
        seen = (replace(example, prompt=example.prompt[-self.window :]) for example in examples)
        found = (text_of(example, self.subset, max_tokens) for example in seen)
        return [text for text in found if text is not None]


def read_material(plan: DistillPlan, questions: Asked, vocabulary: Vocabulary) -> Material:
    """Raises PromptError when one side has no answers, and what `first_draft` raises."""
    training, held_out = (read_examples(plan.answers_folder, side) for side in questions)
    if not training or not held_out:
        why = f"{len(training)} answers to train on, {len(held_out)} held out"
        raise PromptError("prompts", why, "Give more prompts, or shorter ones.")
    draft, subset = first_draft(plan, training, vocabulary)
    # What knows all tokens reads all: other engines would not know better.
    return Material(draft, subset, training, held_out, plan.settings.window if subset.has_other else 0)


def first_draft(
    plan: DistillPlan, examples: Sequence[Example], vocabulary: Vocabulary
) -> tuple[Checkpoint, Subset]:
    """The untrained draft that a plan asks for, and the tokens of the target's `vocabulary` that it knows.
    Without examples its layers are any; a notice says which were chosen.

    Raises ModelFileError and SettingError for a base that cannot be read or does not go with the target.
    """
    base = read_gguf(plan.base or plan.file.path)
    have = base.shape.layers
    count = plan.settings.layers or min(USUAL_LAYERS, have)
    if base.shape.vocabulary != vocabulary.size:
        reason = f"it knows {base.shape.vocabulary} tokens, the target {vocabulary.size}"
        raise SettingError(str(plan.base), reason, "Start from a model with the target's own tokenizer.")
    if count > have:
        raise SettingError(f"--layers {count}", f"it has {have} layers", f"Give 1 to {have}.")
    subset = _tokens_used(examples, vocabulary, plan.settings.vocabulary)
    reduced = restrict(base, subset)
    if not examples:
        return keep_layers(reduced, range(count)), subset

    layers = best_layers(reduced, subset, examples, count)
    notify(f"its layers are {', '.join(map(str, layers))} of {have}")
    return keep_layers(reduced, layers), subset


def _tokens_used(examples: Sequence[Example], vocabulary: Vocabulary, size: int | None) -> Subset:
    counts = np.zeros(vocabulary.size, dtype=np.int64)
    for example in examples:
        counts += np.bincount(example.answer, minlength=vocabulary.size)
    size = USUAL_VOCABULARY if size is None else size
    return choose_subset(vocabulary, counts, size or vocabulary.size)


def best_layers(model: Checkpoint, subset: Subset, examples: Sequence[Example], count: int) -> list[int]:
    """The `count` layers of `model`, whose tokens are those of `subset`, with which most drafts drawn along
    the answers of `examples` would be accepted.

    Tried are the first few with the last few, and the layers that change their input most, by the cosine of
    the states before and after (ShortGPT, arXiv 2403.03853).
    """
    some = examples[:: -(-len(examples) // _TEXTS)]
    texts = [text for example in some if (text := text_of(example, subset, _TEXT_TOKENS))]
    batch = batch_of(texts, device_of())
    network = Network.of(model, batch.tokens.device)

    def accepted(layers: Sequence[int]) -> float:
        same = next((at for at, layer in enumerate(layers) if at != layer), len(layers))
        x = states[same]  # of the layers before, none is missing
        for layer in layers[same:]:
            x = network.layer(layer, x)
        ends = network.normed(x).flatten(0, 1)[batch.places]
        return float(acceptance(network.logits(ends), batch.labels).mean())

    with torch.no_grad():
        states = [embedding(batch.tokens, network.weights["token_embd.weight"])]
        for layer in range(model.shape.layers):
            states.append(network.layer(layer, states[-1]))
        changes = pairwise(x.flatten(0, 1)[batch.places] for x in states)
        influences = [1 - float(cosine_similarity(*change, dim=-1).mean()) for change in changes]
        return max(_candidates(influences, count), key=accepted)


def _candidates(influences: Sequence[float], count: int) -> Iterator[list[int]]:
    layers = range(len(influences))
    yield sorted(sorted(layers, key=lambda layer: -influences[layer])[:count])
    for first in range(1, count, max(1, count // _DIVISIONS)):
        yield [*layers[:first], *layers[len(layers) - (count - first) :]]
