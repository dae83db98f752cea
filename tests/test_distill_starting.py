"""Which layers a draft begins with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from distilling import random_weights
from outrider.lab.distill.checkpoint import Checkpoint, read_gguf, restrict
from outrider.lab.distill.examples import Example
from outrider.lab.distill.network import Network
from outrider.lab.distill.on_policy import top_tokens
from outrider.lab.distill.starting import best_layers
from outrider.models.vocab.subset import Subset
from tiny_gguf import write_tiny

IGNORED = 5
"""a number of the states that no layer reads"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Six layers with random weights, whose likely tokens depend on all of them."""
    like = read_gguf(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=6))
    made = random_weights(like, like.shape, seed=1)
    weights = {name: values * (2 if values.ndim > 1 else 1) for name, values in made.weights.items()}
    return made.with_weights(made.shape, weights)


def changed(model: Checkpoint, layers: Sequence[int], factor: float) -> Checkpoint:
    """What these layers add to their input, times a factor."""
    names = [f"blk.{layer}.{part}.weight" for layer in layers for part in ("attn_output", "ffn_down")]
    weights = dict(model.weights) | {name: factor * model.weights[name] for name in names}
    return model.with_weights(model.shape, weights)


def answers(model: Checkpoint, count: int = 8) -> list[Example]:
    """What a model itself says, with its distributions."""
    network = Network.of(model, 64, dtype=torch.float32, device=torch.device("cpu"))
    random = np.random.default_rng(3)
    found = []
    for i in range(count):
        tokens = random.integers(model.shape.vocabulary, size=24).astype(np.int32)
        with torch.inference_mode():
            states = network.states(torch.from_numpy(tokens).long()[None])
            rows = network.logits(states[0, 4:]).numpy()
        answer = np.append(tokens[5:], 0).astype(np.int32)
        found.append(Example(f"{i}", "", tokens[:5], answer, *top_tokens(rows, 16), 0.0, ""))
    return found


def whole(model: Checkpoint) -> Subset:
    return Subset.whole(model.shape.vocabulary)


def test_layers_that_change_nothing_are_left_out(model: Checkpoint) -> None:
    idle = changed(model, (1, 3, 4), 1e-4)
    assert best_layers(idle, whole(model), answers(idle), 3) == [0, 2, 5]


def test_a_layer_whose_change_no_other_reads_is_left_out(model: Checkpoint) -> None:
    # It changes its input more than the last two, so that it would be kept by that alone.
    quiet = changed(model, (1, 4, 5), 0.3)
    weights = dict(quiet.weights)
    for name, values in quiet.weights.items():
        if "norm" in name:
            weights[name] = np.where(np.arange(len(values)) == IGNORED, 0, values).astype(np.float32)
    for layer in (2, 3):
        for part in ("attn_output", "ffn_down"):
            name = f"blk.{layer}.{part}.weight"
            weights[name] = np.zeros_like(weights[name])
    random = np.random.default_rng(0)
    weights["blk.2.ffn_down.weight"][IGNORED] = 0.2 * random.standard_normal(model.shape.feed_forward)
    loud = model.with_weights(model.shape, weights)
    assert best_layers(loud, whole(model), answers(loud), 4) == [0, 1, 4, 5]


def test_what_a_draft_cannot_say_is_not_asked_of_it(model: Checkpoint) -> None:
    idle = changed(model, (2, 3), 1e-4)
    subset = Subset.of(range(0, model.shape.vocabulary, 2), model.shape.vocabulary)
    assert best_layers(restrict(idle, subset), subset, answers(idle), 4) == [0, 1, 4, 5]


@pytest.mark.parametrize("count", [1, 6])
def test_one_layer_or_all(model: Checkpoint, count: int) -> None:
    found = best_layers(model, whole(model), answers(model), count)
    assert len(found) == count and found == sorted(set(found)) and set(found) <= set(range(6))
