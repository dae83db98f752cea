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
from engines import GREEDY, asked
from head_files import OPTIONS
from outrider.backends.gguf import Weights
from outrider.backends.gguf.model import GgufModel
from outrider.core.data import Span
from outrider.engine import Engine
from outrider.lab.distill.corpus import Corpus, Text, batch_of
from outrider.lab.distill.evaluation import Predictions, StepCosts
from outrider.lab.distill.examples import Example, example_path, read_example
from outrider.lab.distill.export import read_provenance, write_head
from outrider.lab.distill.generate import generate
from outrider.lab.distill.head import HeadCheckpoint, first_head, head_text, layers_read, read_target
from outrider.lab.distill.head_network import HeadNetwork
from outrider.lab.distill.losses import Labels, acceptance, loss_of
from outrider.lab.distill.plan import LOSSES, DraftPlan
from outrider.lab.distill.questions import Question
from outrider.lab.distill.states import read_states, read_tokens, states_path, write_states
from outrider.lab.distill.train import Trainer, TrainingSettings
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt
from outrider.models import read_card
from outrider.models.gguf import ModelCard
from outrider.models.header import read_header
from outrider.models.vocab.subset import Subset
from outrider.policy import FixedPolicy
from outrider.session.drafts import load_head
from outrider.session.pair import Pair
from tiny.sizes import Sizes
from tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")

CPU = torch.device("cpu")
CONTEXT = 128
PRICES = StepCosts(tuple(1 + 0.1 * n for n in range(17)), 0.05)
SETTINGS = TrainingSettings(
    steps=70, batch_tokens=512, learning_rate=3e-2, warmup_steps=5, loss="kl", evaluate_every=35
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


# The training


def trainer_of(made: Made, folder: Path, settings: TrainingSettings = SETTINGS, **more: Any) -> Trainer:
    held_out, training = made.texts(made.examples[:12]), made.texts(made.examples[12:])
    corpus = Corpus(training, batch_tokens=settings.batch_tokens, seed=settings.seed)
    folder.mkdir(exist_ok=True)
    return Trainer(more.get("start", made.head), corpus, held_out, PRICES, settings, folder, device=CPU)


@pytest.fixture(scope="module")
def trained(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = trainer_of(made, tmp_path_factory.mktemp("trained"))
    trainer.run()
    return trainer


def test_every_weight_learns_and_the_predictions_get_better_at_every_place(
    made: Made, trained: Trainer, tmp_path: Path
) -> None:
    history, best = trained.state.history, trained.best()
    assert history[-1].loss < 0.5 * history[0].loss
    assert history[-1].agreement > history[0].agreement + 0.3
    for name, values in made.head.weights.items():
        assert best.weights[name].shape == values.shape and np.any(best.weights[name] != values), name
    assert isinstance(best, HeadCheckpoint) and best.embedding is made.head.embedding

    def share(found: list[Predictions], place: int) -> float:
        return float(np.mean([np.mean(a.matches[place, place:]) for a in found]))

    before, after = trainer_of(made, tmp_path / "a").predictions(), trained.predictions()
    assert len(before) == len(after) and all(len(a.matches) == made.head.places for a in after)
    for place in range(made.head.places):
        assert share(after, place) > share(before, place) + 0.3


def test_a_stopped_training_ends_in_the_same_weights(made: Made, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=12, evaluate_every=4, quantization="Q4_0")
    whole = trainer_of(made, tmp_path / "whole", settings).run()

    def stop(trainer: Trainer) -> None:
        if trainer.state.step == 7:
            trainer.save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_of(made, tmp_path / "stopped", settings).run(stop)
    again = trainer_of(made, tmp_path / "stopped", settings)
    assert again.state.step == 7
    for name, values in again.run().weights.items():
        np.testing.assert_array_equal(values, whole.weights[name], err_msg=name)


def test_the_gradients_are_those_of_the_whole_loss_at_once(made: Made, tmp_path: Path) -> None:
    trainer = trainer_of(made, tmp_path / "a", start=shaken(made.head))
    batch = batch_of(trainer.corpus.texts[:3], CPU)
    loss = trainer._backward(batch, trainer.network)
    found = {name: weight.grad for name, weight in trainer.network.weights.items()}
    plain = HeadNetwork.of(shaken(made.head), CONTEXT, dtype=torch.float32, device=CPU)
    for weight in plain.weights.values():
        weight.requires_grad_()
    parts = []
    for place, states in enumerate(plain.along(batch)):
        labels = batch.labels.at(batch.numbers >= place)
        parts.append(0.8**place * loss_of("kl", plain.logits(states), labels).mean())
    whole = torch.stack(parts).sum() / sum(0.8**place for place in range(len(parts)))
    whole.backward()
    assert loss == pytest.approx(float(whole.detach()), rel=2e-2)
    for name, weight in plain.weights.items():
        mine, right = found[name], weight.grad
        assert mine is not None and right is not None
        distance = (mine - right).norm() / right.norm()
        assert distance < 0.05, name  # the trainer may compute with 16 bits


def test_answers_of_one_token_and_texts_without_a_prompt_are_no_fault(made: Made, tmp_path: Path) -> None:
    example = made.examples[0]
    short = replace(
        example,
        answer=example.answer[:1],
        ids=example.ids[:1],
        log_probs=example.log_probs[:1],
        rest=example.rest[:1],
    )
    [text] = made.texts([short])
    assert len(text.ids) == 1
    for size in (0, 1):
        assert made.texts([replace(example, prompt=example.prompt[:size])]) == []
    corpus = Corpus([text], batch_tokens=64, seed=0)
    trainer = Trainer(made.head, corpus, [text], PRICES, replace(SETTINGS, steps=2), tmp_path, device=CPU)
    trainer.run()
    assert np.isfinite(trainer.state.history[-1].loss)


# A token that cannot be drafted


def test_the_loss_compares_what_can_be_drafted_and_the_acceptance_everything() -> None:
    logits = torch.tensor([[1.0, 0.0, 0.5, -torch.inf]], requires_grad=True)
    ids = torch.tensor([[3, 0, 1]])
    labels = Labels(ids, torch.tensor([[0.6, 0.2, 0.1]]), torch.tensor([0.1]))
    restricted = Labels(ids[:, 1:], torch.tensor([[0.5, 0.25]]), torch.tensor([0.25]))
    for kind in LOSSES:
        found = loss_of(kind, logits, labels)
        assert found.item() == pytest.approx(loss_of(kind, logits[:, :3], restricted).item(), rel=1e-5), kind
        [gradient] = torch.autograd.grad(found.sum(), logits)
        assert torch.isfinite(gradient).all() and gradient[0, 3] == 0
    q = logits.detach().softmax(-1)[0]
    right = min(0.2, float(q[0])) + min(0.1, float(q[1])) + min(0.1, float(q[2]))
    assert acceptance(logits.detach(), labels).item() == pytest.approx(right, rel=1e-5)


def test_where_nothing_can_be_drafted_nothing_is_learnt() -> None:
    logits = torch.tensor([[1.0, 0.0, -torch.inf]], requires_grad=True)
    labels = Labels(torch.tensor([[2]]), torch.tensor([[1.0]]), torch.tensor([0.0]))
    for kind in LOSSES:
        [gradient] = torch.autograd.grad(loss_of(kind, logits, labels).sum(), logits)
        assert torch.equal(gradient, torch.zeros(1, 3)), kind


# The file


@pytest.mark.parametrize("types", [("F32", "F32"), ("Q4_0", "Q8_0")])
def test_the_file_drafts_and_greedy_texts_stay_the_targets(
    made: Made, trained: Trainer, tmp_path: Path, types: tuple[str, str]
) -> None:
    head = trained.best()
    assert isinstance(head, HeadCheckpoint)
    path = written(made, head, tmp_path / "head.gguf", quantization=types[0], embedding_quantization=types[1])
    assert read_provenance(path) == PROVENANCE
    tensors = {tensor.name for tensor in read_header(path).tensors}
    assert tensors == {*head.weights, "d2t"} and "token_embd.weight" not in tensors
    requests = [
        asked(example.prompt.tolist(), max_tokens=40, sampling=GREEDY, ignore_end=True)
        for example in made.examples[:6]  # held out
    ]
    plain = [Engine(made.weights.open(CONTEXT)).generate(request) for request in requests]
    policy = FixedPolicy(draft_max=3, p_min=0.0)
    with (
        closing(Pair.load(made.path, path, options=OPTIONS)) as pair,
        pair.open(CONTEXT, policy=policy, lookup=False) as session,
    ):
        found = [session.engine.generate(request) for request in requests]
    assert [completion.tokens for completion in found] == [completion.tokens for completion in plain]
    records = [record for completion in found for record in completion.records if record.draft]
    drafted, accepted = (sum(len(r.draft) for r in records), sum(r.num_accepted for r in records))
    assert accepted > 0.2 * drafted > 0, (accepted, drafted)
