"""EAGLE-3 heads in the making: what is trained is what llama.cpp runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")

import torch
from torch.nn.utils.rnn import pad_sequence

from backends import MAINLINE
from distilling import PROVENANCE
from head_files import OPTIONS
from outrider.backends.gguf import Weights
from outrider.backends.gguf.model import GgufModel
from outrider.core.data import Span
from outrider.distill.checkpoint import Checkpoint
from outrider.distill.corpus import Corpus, Text, batch_of
from outrider.distill.evaluation import StepCosts
from outrider.distill.examples import Example, example_path, read_example
from outrider.distill.export import write_head
from outrider.distill.generate import generate
from outrider.distill.head import HeadCheckpoint, first_head, head_text, layers_read, read_target
from outrider.distill.head_network import HeadNetwork
from outrider.distill.losses import Labels, acceptance, loss_of
from outrider.distill.plan import DraftPlan
from outrider.distill.questions import Question
from outrider.distill.states import read_states, read_tokens, states_path, write_states
from outrider.distill.train import Trainer, TrainingSettings
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt
from outrider.models import read_card
from outrider.models.gguf import ModelCard
from outrider.models.vocab.subset import Subset
from outrider.session.drafts import load_head
from tiny.sizes import Sizes
from tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

CPU = torch.device("cpu")
CONTEXT = 128
PRICES = StepCosts(tuple(1 + 0.1 * n for n in range(17)), 0.05)
SETTINGS = TrainingSettings(
    steps=120, batch_tokens=2048, learning_rate=3e-3, warmup_steps=5, loss="kl", evaluate_every=40
)
KNOWN = 280
WORDS = ("the", "rain", "a", "stone", "king", "shore", "in", "on")


@dataclass(frozen=True)
class Made:
    """A tiny target that repeats itself, its answers, and the head that it begins with."""

    path: Path
    weights: Weights
    model: GgufModel
    examples: list[Example]
    states: Path
    head: HeadCheckpoint
    subset: Subset

    def texts(self, examples: list[Example]) -> list[Text]:
        found = [head_text(example, self.subset, CONTEXT, self.states) for example in examples]
        return [text for text in found if text is not None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("head")
    path = write_tiny(folder / "target.gguf", layers=4, repeating=True, sizes=Sizes(kv_heads=2))
    weights = Weights(path, OPTIONS)
    model = weights.open(CONTEXT)
    random = np.random.default_rng(0)
    questions = [
        Question(Prompt(id=str(i), messages=" ".join(random.choice(WORDS, size=4))), "words", 0.8 * (i % 2))
        for i in range(60)
    ]
    generate(LoadedTarget("target", model), questions, folder, max_tokens=32)
    examples = [read_example(example_path(folder, question.id)) for question in questions]
    head, subset = first_head(read_target(path), DraftPlan(vocabulary=KNOWN), examples, model.vocabulary)
    states = folder / "states"
    states.mkdir()
    write_states(weights, head.layers, examples, states, CONTEXT, lambda _count: None)
    yield Made(path, weights, model, examples, states, head, subset)
    weights.close()


def shaken(head: HeadCheckpoint, seed: int = 1) -> HeadCheckpoint:
    """With other weights everywhere, so that none goes unnoticed."""
    random = np.random.default_rng(seed)
    weights = {
        name: (values + 0.3 * values.std() * random.standard_normal(values.shape)).astype(np.float32)
        if values.ndim > 1
        else (1 + 0.3 * random.standard_normal(values.shape)).astype(np.float32)
        for name, values in head.weights.items()
    }
    weights["blk.0.attn_q.weight"] *= 3
    return replace(head, weights=weights)


def card_of(path: Path) -> ModelCard:
    return read_card(path)


def written(made: Made, head: HeadCheckpoint, path: Path, **options: Any) -> Path:
    types = {"quantization": "F32", "embedding_quantization": "F32"} | options
    return write_head(head, path, target=made.path, provenance=PROVENANCE, **types).path


def states_of(made: Made, example: Example) -> npt.NDArray[np.float32]:
    """What goes into the target's layers, read one token at a time."""
    with closing(made.weights.open(CONTEXT)) as model:
        hidden = model.keep_hidden_states(made.head.layers)
        for at, token in enumerate(read_tokens(example).tolist()):
            model.decode([Span(0, (token,), at, 0)])
        return hidden.of(0)


# What is trained on


def test_the_states_are_what_goes_into_the_layers_as_the_library_gives_them(made: Made) -> None:
    example = made.examples[3]
    found = read_states(states_path(made.states, example))
    assert found.shape == (len(read_tokens(example)), 3 * made.head.shape.width)
    np.testing.assert_allclose(found, states_of(made, example), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("layers", "read"), [(30, (2, 15, 27)), (24, (2, 12, 21)), (4, (1, 2, 2)), (2, (0, 1, 1))]
)
def test_a_low_a_middle_and_a_high_layer_are_read(layers: int, read: tuple[int, ...]) -> None:
    assert layers_read(layers) == read and max(read) < layers


# The same numbers as llama.cpp


@pytest.mark.parametrize("known", [KNOWN, 0])
@pytest.mark.parametrize("at", [2, 9])
def test_every_place_of_a_draft_is_what_llama_cpp_computes(
    made: Made, tmp_path: Path, at: int, known: int
) -> None:
    """`at`: labelled positions before the first place of the draft."""
    target = read_target(made.path)
    head, subset = first_head(target, DraftPlan(vocabulary=known), made.examples, made.model.vocabulary)
    head = shaken(head)
    examples = made.examples[4:7]  # others are in the batch
    texts = [head_text(example, subset, CONTEXT, made.states) for example in examples]
    batch = batch_of([text for text in texts if text is not None], CPU)
    exact = [torch.from_numpy(states_of(made, example)) for example in examples]  # not rounded to 16 bits
    batch = replace(batch, states=pad_sequence(exact, batch_first=True))
    network = HeadNetwork.of(head, CONTEXT, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        places = [network.logits(states) for states in network.along(batch)]
    assert len(places) == 5
    path = written(made, head, tmp_path / "head.gguf")
    weights = load_head(made.weights, card_of(made.path), card_of(path), OPTIONS)
    example = examples[1]
    tokens = read_tokens(example).tolist()
    theirs = []
    with closing(made.weights.open(CONTEXT)) as feeding, closing(weights):
        model = weights.open_beside(feeding, CONTEXT)
        first = len(example.prompt) - 1 + at
        feeding.decode([Span(0, tuple(tokens[:first]), 0, 0)])
        [row] = model.decode([Span(0, tuple(tokens[: first + 1]), 0, 1)])
        theirs.append(row[0].copy())
        for place in range(1, 5):
            [row] = model.decode([Span(0, (tokens[first + place],), first + place, 1)])
            theirs.append(row[0].copy())
    ids = subset.to_target[: subset.size - subset.has_other]
    for place in range(5):
        wanted = batch.numbers >= place
        of_second = batch.places[wanted] // batch.tokens.shape[1] == 1
        found = places[place][of_second & (batch.numbers[wanted] == at + place)][0].numpy()
        np.testing.assert_allclose(found[: len(ids)], theirs[place][ids], rtol=1e-4, atol=1e-4)
        others = np.delete(theirs[place], ids)
        assert (others == -np.inf).all() and (found[len(ids) :] == -np.inf).all()
