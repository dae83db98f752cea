"""An EAGLE-3 head before training (Li et al. 2025, arXiv 2503.01840), and the texts it is trained on.

It has one layer, whose attention reads a token's embedding and a state side by side. The state is fused of
what goes into three of the target's layers; where the target has not evaluated a token yet, it is the head's
own. Names and layout are those of llama.cpp's files of kind eagle3. Embeddings are the target's, and not in
the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outrider.backends.gguf import Weights, check_layers
from outrider.backends.gguf.heads import why_no_heads
from outrider.core.contracts import Vocabulary
from outrider.core.errors import ModelFileError
from outrider.lab.distill.checkpoint import Array, Checkpoint, read_gguf
from outrider.lab.distill.examples import Example, tokens_used
from outrider.lab.distill.plan import DraftPlan
from outrider.lab.distill.states import read_tokens, states_path
from outrider.models.vocab.subset import Subset

if TYPE_CHECKING:
    from outrider.lab.distill.corpus import Text

ARCHITECTURE = "eagle3"
INSTEAD = "Leave out --kind eagle3: a draft model reads nothing of its target."
_BLOCK = "blk.0."


@dataclass(frozen=True, slots=True)
class HeadCheckpoint(Checkpoint):
    """A head's weights by their GGUF names. `embedding` (target tokens, width) is the target's, `layers` are
    those whose inputs are read; logits are of the tokens `drafted`, of the target's ids."""

    embedding: Array
    layers: tuple[int, ...]
    drafted: Subset
    places: int
    """of a draft, at which it is trained to predict"""

    @property
    def parameters(self) -> int:
        return sum(values.size for values in self.weights.values() if values.ndim > 1)


def layers_read(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high one of so many: those that EAGLE-3 and llama.cpp's converter take."""
    return min(2, layers // 3), layers // 2, max(layers - 3, layers // 2)


def read_target(path: Path) -> Checkpoint:
    """The target of a head. Raises ModelFileError where no head can be made for it."""
    try:
        return read_gguf(path)
    except ModelFileError as error:
        raise ModelFileError(error.what, f"no head can be made for it: {error.why}", INSTEAD) from error


def check_target(target: Weights, layers: Sequence[int]) -> None:
    """Raise ModelFileError or BackendCrash where the target does not give what goes into these layers."""
    path = str(target.path)
    if lacks := why_no_heads(target.library, of_layers=True):
        raise ModelFileError(path, f"{target.library.title} runs no heads here: {lacks}", INSTEAD)
    check_layers(target, layers, path, INSTEAD)


def first_head(
    target: Checkpoint, plan: DraftPlan, examples: Sequence[Example], vocabulary: Vocabulary
) -> tuple[HeadCheckpoint, Subset]:
    """The untrained head that a plan asks for, and the tokens that it drafts.

    It begins as the target's last layer, which reads the highest of the three states and nothing of the new
    token, after which come the target's own rows of the output.
    """
    subset = tokens_used(examples, vocabulary, plan.vocabulary)
    shape = replace(target.shape, architecture=ARCHITECTURE, layers=1)
    embedding = target.weights["token_embd.weight"]
    last = f"blk.{target.shape.layers - 1}."
    weights = {
        name.replace(last, _BLOCK): values
        for name, values in target.weights.items()
        if name.startswith(last)
        and name.endswith(".weight")
        and "_q_norm" not in name
        and "_k_norm" not in name
    }
    weights[f"{_BLOCK}attn_norm_2.weight"] = weights[f"{_BLOCK}attn_norm.weight"]
    weights[f"{_BLOCK}attn_norm.weight"] = target.weights["blk.0.attn_norm.weight"]
    for part in "qkv":
        name = f"{_BLOCK}attn_{part}.weight"
        weights[name] = np.concatenate([np.zeros_like(weights[name]), weights[name]], axis=1)
    weights["fc.weight"] = np.eye(shape.width, 3 * shape.width, 2 * shape.width, dtype=np.float32)
    weights["output_norm.weight"] = target.weights["output_norm.weight"]
    known = subset.to_target[: subset.size - subset.has_other]
    weights["output.weight"] = target.weights.get("output.weight", embedding)[known]
    layers = layers_read(target.shape.layers)
    head = HeadCheckpoint(
        shape,
        weights,
        target.metadata,
        embedding=embedding,
        layers=layers,
        drafted=subset,
        places=plan.places,
    )
    return head, subset


def head_text(example: Example, subset: Subset, max_tokens: int, states: Path) -> Text | None:
    """As `text_of`, with the target's own tokens and its states, which lie in a folder. None too where
    nothing comes before the first label: a head reads no text's first token."""
    from outrider.lab.distill.corpus import text_of  # it needs PyTorch

    text = text_of(example, subset, max_tokens)
    if text is None or len(text.tokens) <= len(text.ids):
        return None
    tokens = read_tokens(example)[-max_tokens:]
    return replace(text, tokens=tokens, states=states_path(states, example))
