"""Training a tiny draft for a tiny target: its losses, its first layers, that it learns and stops in time."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from distilling import PROVENANCE, random_weights
from engines import END, VOCABULARY, asked
from llama_cpp_models import SMALL
from outrider.backends.fake import FakeModel, random_logits
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.core.params import SamplingParams
from outrider.costs.expected_speed import StepCosts
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.distill import corpus, train
from outrider.lab.distill.answers import Example, Question, generate, read_examples
from outrider.lab.distill.checkpoint import Checkpoint, keep_layers, read_gguf, restrict, write_gguf
from outrider.lab.distill.corpus import (
    Evaluation,
    Labels,
    Predictions,
    Text,
    acceptance,
    expected_speedup,
    loss_of,
    predictions_of,
    text_of,
)
from outrider.lab.distill.network import Network
from outrider.lab.distill.plan import Training
from outrider.lab.distill.run import best_layers
from outrider.lab.distill.train import ROUNDED, OnPolicy, Trainer, rounded, top_tokens
from outrider.lab.loaded import LoadedTarget
from outrider.lab.prompts import Prompt
from outrider.models.vocab import align
from outrider.models.vocab.subset import Subset, choose_subset
from outrider.policy.fixed import FixedPolicy
from tiny_gguf import write_tiny

CPU = torch.device("cpu")
CONTEXT = 96
PRICES = StepCosts((1.0, 1.05, 1.1, 1.15, 1.2), 0.05)
WORDS = ("the", "and", "return", "(10", "in on", "def a")
SETTINGS = Training(batch_tokens=256, learning_rate=3e-3, steps=12)


@dataclass
class Teacher:
    """A tiny target and its answers, of which every eighth is held out."""

    checkpoint: Checkpoint
    native: GgufModel
    training: list[Example]
    held_out: list[Example]

    def texts(self, subset: Subset) -> tuple[list[Text], list[Text]]:
        return tuple(  # type: ignore[return-value]
            [text for example in side if (text := text_of(example, subset, CONTEXT))]
            for side in (self.training, self.held_out)
        )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    folder = tmp_path_factory.mktemp("teacher")
    path = write_tiny(folder / "teacher.gguf")
    weights = Weights(path, SMALL)
    native, checkpoint = weights.open(CONTEXT, max_sequences=32), read_gguf(path)
    random = np.random.default_rng(0)
    questions = [
        Question(
            Prompt(id=f"{i}", messages=f"{' '.join(random.choice(WORDS, size=3))} {chr(97 + i % 26)}"),
            "words", 0.8 * (i % 2),
        )
        for i in range(160)
    ]  # fmt: skip
    generate(LoadedTarget("teacher", native), questions, folder, max_tokens=40)
    examples = read_examples(folder, questions)
    yield Teacher(
        checkpoint, native,
        [example for i, example in enumerate(examples) if i % 8 not in (0, 1)],
        [example for i, example in enumerate(examples) if i % 8 in (0, 1)],
    )  # fmt: skip
    weights.close()


def trainer_of(
    teacher: Teacher,
    *,
    subset: Subset | None = None,
    quantizations: tuple[str, str] = ("F32", "F32"),
    **changes: Any,
) -> Trainer:
    subset = subset or Subset.whole(teacher.native.vocabulary.size)
    training, held_out = teacher.texts(subset)
    start, own = restrict(keep_layers(teacher.checkpoint, (0,)), subset), None
    if "on_policy" in changes:
        own = OnPolicy(teacher.training, teacher.native, subset, num_texts=4, max_tokens=CONTEXT, seed=0)
    settings = SETTINGS.model_copy(update=changes)
    return Trainer(start, training, held_out, PRICES, settings, quantizations, own)


@pytest.fixture(autouse=True)
def three_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_EVALUATIONS", 3)


def agreeing(trainer: Trainer, draft: Checkpoint) -> tuple[int, int]:
    """Of the held-out greedy answers' tokens: how many are what the draft finds most likely, of how many.
    Worked out one answer at a time."""
    network = Network.of(draft, CPU)
    agree = total = 0
    for text in trainer.held_out:
        if text.is_greedy:
            with torch.inference_mode():
                states = network.states(torch.from_numpy(text.tokens).long()[None])
                rows = network.logits(states[0, -len(text.ids) :]).numpy()
            agree += int((rows.argmax(-1) == text.ids[:, 0]).sum())
            total += len(text.ids)
    return agree, total


# Learning


def test_a_draft_learns_what_its_target_says(teacher: Teacher) -> None:
    trainer = trainer_of(teacher, steps=40, batch_tokens=768)
    before, total = agreeing(trainer, keep_layers(teacher.checkpoint, (0,)))
    said: list[int] = []
    best = trainer.run(lambda trainer: said.append(trainer.step))
    after, _ = agreeing(trainer, best)
    assert total > 700 and before < 0.25 * total, (before, total)
    assert after > 1.4 * before and after > 0.28 * total, (before, after, total)
    first, *_, last = trainer.history
    assert first.agreement == pytest.approx(before / total, abs=2 / total)
    assert last.loss < 0.7 * first.loss and last.acceptance > first.acceptance + 0.1
    assert trainer.last_loss < last.loss
    assert said == list(range(1, 41)) and trainer.done == 1
    assert trainer.trained_tokens > 40 * 300


@pytest.mark.parametrize(
    "evaluations",
    [
        # (agreement, speedup) of the start and of every second step
        [(0.5, 1.0), (0.5, 1.2), (0.6, 1.1), (0.5, 1.15), (0.5, 1.19), (0.5, 1.5)],
        # The machine that trains need not be the one that the draft is for: none pays here.
        [(0.1, 7.0), (0.6, 7.0), (0.2, 7.0), (0.5, 7.0), (0.4, 7.0), (0.7, 7.0)],
    ],
    ids=["by expected speed", "by agreement"],
)
def test_the_best_is_kept_not_the_last(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch, evaluations: list[tuple[float, float]]
) -> None:
    scripted = iter(evaluations)
    monkeypatch.setattr(train, "evaluate", lambda *_: Evaluation(0, 1.0, 0.5, *next(scripted)))
    monkeypatch.setattr(train, "_EVALUATIONS", 20)
    monkeypatch.setattr(train, "_PATIENCE", 3)
    trainer = trainer_of(teacher, steps=40)
    weights: list[dict[str, Any]] = []
    best = trainer.run(
        lambda t: weights.append({n: w.detach().clone() for n, w in t.network.weights.items()})
    )
    assert trainer.step == 8 and trainer.best_step == 2, "three without a better one end it"
    for name, values in best.weights.items():
        np.testing.assert_array_equal(values, weights[1][name].numpy())
        assert name.endswith("norm.weight") or not np.array_equal(values, weights[-1][name].numpy())


def test_padding_and_batches_change_no_evaluation(teacher: Teacher) -> None:
    found = []
    for batch_tokens in (64, 256, 4096):
        trainer = trainer_of(teacher, batch_tokens=batch_tokens)
        trainer._evaluate()
        found.append(asdict(trainer.history[0]))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4, nan_ok=True)


def test_evaluations_in_between_are_of_some_answers(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of many would take longer than the training itself.
    counts = []

    def evaluate(read: Iterator[Any], costs: StepCosts) -> Evaluation:
        everything = list(read)
        counts.append(sum(len(texts) for texts, *_ in everything))
        return corpus.evaluate(everything, costs)

    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(train, "_JUDGED", 16)
    trainer = trainer_of(teacher, steps=1)
    trainer.run()
    assert counts == [20, 20] and len(teacher.held_out) == 40
    assert len(trainer.predictions()) == 20, "what is known of a draft is of all greedy ones"


@pytest.mark.parametrize("quantization", sorted(ROUNDED))
def test_weights_are_rounded_as_their_file_holds_them(quantization: str) -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    kind = GGMLQuantizationType[quantization]
    found = rounded(weight, quantization)
    held = dequantize(quantize(weight.detach().numpy(), kind), kind)
    np.testing.assert_array_equal(found.detach().numpy(), held)
    found.sum().backward()
    assert weight.grad is not None and (weight.grad == 1).all()
    assert rounded(weight, "Q6_K") is weight


# Repeated, and ended


@pytest.mark.parametrize(
    "settings",
    [{}, {"on_policy": 0.7}, {"quantizations": ("Q4_0", "Q8_0")}],
    ids=["the target's text", "the draft's own", "rounded"],
)
def test_a_training_repeats_and_what_ends_it_leaves_the_best_so_far(
    teacher: Teacher, settings: dict[str, Any]
) -> None:
    whole, again, ended = (trainer_of(teacher, **settings) for _ in range(3))
    expected, same = whole.run(), again.run()
    assert (again.history, again.trained_tokens) == (whole.history, whole.trained_tokens)
    for name, weight in whole.network.weights.items():
        assert torch.equal(weight, again.network.weights[name]), name
        np.testing.assert_array_equal(same.weights[name], expected.weights[name])

    def end(trainer: Trainer) -> None:
        if trainer.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended.run(end)
    assert ended.history == whole.history[:3] and ended.best_step in (0, 4, 8)
    assert ended.best().weights.keys() == expected.weights.keys()


def test_a_training_by_the_clock_ends_with_its_time(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr(train, "perf_counter", lambda: float(next(seconds)))
    trainer = trainer_of(teacher, steps=None, minutes=10 / 60)
    trainer.run()
    assert trainer.step == 10 and trainer.done == 1
    assert [found.step for found in trainer.history] == [0, 4, 7, 10]


# The draft's own text


def small_network(vocabulary: int, like: Checkpoint) -> Network:
    made = random_weights(like, replace(like.shape, layers=1, vocabulary=vocabulary), 0)
    return Network.of(made, CPU)


LANGUAGE = random_logits(VOCABULARY.size, seed=4, order=2)


def letters(prompt: int, answer: int, seed: int = 0) -> Example:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, END, prompt + answer).astype(np.int32)
    return Example(
        "x", "letters", tokens[:prompt], tokens[prompt:], np.zeros((answer, 3), dtype=np.int32),
        np.zeros((answer, 3), dtype=np.float16), np.zeros(answer, dtype=np.float16), 0.0, "",
    )  # fmt: skip


def test_own_texts_are_labelled_by_the_target(teacher: Teacher) -> None:
    target = FakeModel(VOCABULARY, LANGUAGE, context_length=64, max_batch_tokens=30, max_rows=24)
    examples = [
        letters(prompt, answer, prompt) for prompt, answer in ((3, 9), (40, 23), (1, 2), (55, 9), (30, 30))
    ]
    own = OnPolicy(examples, target, Subset.whole(6), num_texts=9, max_tokens=1000, seed=5)
    network = small_network(6, teacher.checkpoint)
    texts = own.texts(network, 3)
    assert len(texts) == 9 and target.length(0) == 0
    for text in texts:
        assert len(text.tokens) <= 64 and not text.is_greedy
        for i, (ids, probs, rest) in enumerate(zip(text.ids, text.probs, text.rest, strict=True)):
            context = text.tokens[: len(text.tokens) - len(text.ids) + i + 1].tolist()
            logits = LANGUAGE(context).astype(float)
            expected = np.exp(logits) / np.exp(logits).sum()
            assert probs[:3].astype(float) == pytest.approx(expected[ids[:3]], abs=3e-3)
            assert float(rest) == pytest.approx(1 - np.sort(expected)[-3:].sum(), abs=3e-3)
        assert END not in text.tokens[-len(text.ids) + 1 :].tolist() or len(text.ids) == 1, "it ends there"
    lengths = {len(text.ids) for text in texts}
    assert max(lengths) <= 24 and len(lengths) > 1
    same, other = own.texts(network, 3), own.texts(network, 4)
    assert [t.tokens.tolist() for t in same] == [t.tokens.tolist() for t in texts]
    assert [t.tokens.tolist() for t in other] != [t.tokens.tolist() for t in texts]


def test_own_texts_hold_no_token_that_the_draft_does_not_know(teacher: Teacher) -> None:
    subset = Subset.of([0, 2, END], 6)
    own = OnPolicy([letters(3, 9)], FakeModel(VOCABULARY, LANGUAGE), subset, 8, max_tokens=60, seed=5)
    for text in own.texts(small_network(4, teacher.checkpoint), 0):
        assert 3 not in text.tokens[-len(text.ids) + 1 :].tolist() or len(text.ids) == 1


# Evaluation


def test_a_token_that_is_not_known_is_never_a_match() -> None:
    ids = np.array([[0, 3], [3, 3], [3, 3]], dtype=np.int32)
    probs = np.array([[0.9, 0], [0, 0.9], [0, 0.9]], dtype=np.float16)
    text = Text(np.zeros(3, dtype=np.int32), ids, probs, np.zeros(3, dtype=np.float16), True, True)
    logits = torch.tensor([[4.0, 0, 0, 0], [0, 0, 0, 9], [9, 0, 0, 0]])
    [found] = predictions_of([text, replace(text, is_greedy=False)], torch.cat([logits, logits]))
    assert found.matches.tolist() == [True, False, False]
    assert found.confidences == pytest.approx([0.948, 0, 0.9996], abs=1e-3)
    [whole] = predictions_of([replace(text, has_other=False)], logits)
    assert whole.matches.tolist() == [True, True, False] and whole.confidences[1] > 0.99


# The whole way


@pytest.mark.parametrize("reduced", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_trained_draft_changes_no_text(teacher: Teacher, tmp_path: Path, reduced: bool) -> None:
    vocabulary = teacher.native.vocabulary
    counts = np.bincount(np.concatenate([e.answer for e in teacher.training]), minlength=vocabulary.size)
    subset = (
        choose_subset(vocabulary, counts.astype(np.int64), 270) if reduced else Subset.whole(vocabulary.size)
    )
    assert subset.has_other == reduced
    trainer = trainer_of(teacher, steps=16, subset=subset)
    path = tmp_path / "draft.gguf"
    write_gguf(
        trainer.run(), path, subset=subset, target=vocabulary, provenance=PROVENANCE,
        quantization="F32", embedding_quantization="F32",
    )  # fmt: skip
    weights = Weights(path, SMALL)
    draft = weights.open(CONTEXT, max_sequences=32)
    drafter = ModelDrafter(draft, align(vocabulary, draft.vocabulary))
    greedy = SamplingParams(temperature=0)
    requests = [
        asked(example.prompt.tolist(), sampling=greedy, max_tokens=30) for example in teacher.held_out[:12:2]
    ]
    plain = [Engine(teacher.native).generate(request) for request in requests]
    engine = Engine(teacher.native, [drafter], FixedPolicy(p_min=0, hand_over=0))
    drafted = [engine.generate(request) for request in requests]
    weights.close()
    assert [found.tokens for found in drafted] == [found.tokens for found in plain]
    assert [found.text for found in drafted] == [found.text for found in plain]
    accepted = sum(record.num_accepted for found in drafted for record in found.records)
    assert accepted > 10, "and it was of use"
    expected = [e.answer[:30].tolist() for e in teacher.held_out[:12:2]]
    assert [list(found.tokens) for found in plain] == expected, "the recorded answers are those of the engine"


# Losses

Probs = npt.NDArray[np.float64]

SIZE = 7


def distributions(seed: int, rows: int = 12, sharpness: float = 2.0) -> Probs:
    logits = np.random.default_rng(seed).standard_normal((rows, SIZE)) * sharpness
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: Probs = powers / powers.sum(-1, keepdims=True)
    return found


def labels_of(p: Probs, top: int) -> Labels:
    """The `top` most likely tokens of each row, and what is left."""
    ids = np.argsort(-p, axis=-1)[:, :top]
    probs = np.take_along_axis(p, ids, -1)
    rest = np.clip(1 - probs.sum(-1), 0, None)
    return Labels(torch.tensor(ids), torch.tensor(probs).float(), torch.tensor(rest).float())


def logits_of(q: Probs) -> Any:
    """Logits of a draft's distribution; what is added to a row of logits changes nothing."""
    return (torch.tensor(q).log() + 3.0).float().requires_grad_()


def merged(p: Probs, q: Probs, top: int) -> tuple[Probs, Probs]:
    """Both distributions over the target's `top` most likely tokens and one for the rest."""
    ids = np.argsort(-p, axis=-1)
    p, q = np.take_along_axis(p, ids, -1), np.take_along_axis(q, ids, -1)
    if top == SIZE:
        return p, q
    return tuple(np.column_stack([x[:, :top], x[:, top:].sum(-1)]) for x in (p, q))  # type: ignore[return-value]


def expected(p: Probs, q: Probs) -> tuple[Probs, Probs]:
    """The loss and the acceptance, worked out from their definitions."""
    kl = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q)), 0).sum(-1)
    tv = np.abs(p - q).sum(-1) / 2
    weight = np.exp(-3 * (1 - tv))
    return weight * kl + (1 - weight) * tv, 1 - tv


@pytest.mark.parametrize("top", [1, 3, SIZE])
def test_the_loss_is_what_its_definition_says(top: int) -> None:
    p, q = distributions(1), distributions(2)
    loss, alpha = expected(*merged(p, q, top))
    assert loss_of(logits_of(q), labels_of(p, top)).detach().numpy() == pytest.approx(loss, abs=2e-6)
    assert acceptance(logits_of(q), labels_of(p, top)).detach().numpy() == pytest.approx(alpha, abs=2e-6)


def test_the_weight_takes_no_gradient() -> None:
    """KL's gradient is q - p; that of the acceptance is worked out by small differences."""
    p, q = distributions(3), distributions(4)
    logits = logits_of(q)
    loss_of(logits, labels_of(p, SIZE)).sum().backward()
    other = logits_of(q)
    (1 - acceptance(other, labels_of(p, SIZE))).sum().backward()
    assert logits.grad is not None and other.grad is not None
    weight = np.exp(-3 * expected(p, q)[1])[:, None]
    found = weight * (q - p) + (1 - weight) * other.grad.numpy()
    assert logits.grad.numpy() == pytest.approx(found, abs=1e-5)


CORNERS: dict[str, tuple[Sequence[float], Sequence[float], float]] = {
    "a draft that excludes what the target says": ([-200.0, 0, 0, 200, 0, 0, 0], [0.9, 0.05], 0.05),
    "a draft that leaves nothing for the rest": ([300.0, 290, 0, 0, 0, 0, 0], [0.3, 0.2], 0.5),
    "a target without a rest": ([0.0] * SIZE, [0.6, 0.4], 0.0),
    "a target that is certain": ([1.0, 2, 3, 4, 5, 6, 7], [1.0, 0.0], 0.0),
    "a target of which nothing is listed": ([0.0] * SIZE, [0.0, 0.0], 1.0),
    "both certain, of different tokens": ([0.0, 0, 90, 0, 0, 0, 0], [1.0, 0.0], 0.0),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_losses_and_gradients_are_finite_in_every_corner(corner: str) -> None:
    row, probs, rest = CORNERS[corner]
    logits = torch.tensor([row], requires_grad=True)
    labels = Labels(torch.tensor([[0, 1]]), torch.tensor([probs]), torch.tensor([rest]))
    loss = loss_of(logits, labels)
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(loss).all() and torch.isfinite(logits.grad).all()
    assert logits.grad.abs().max() <= 20, "no position may outweigh all others"


def test_a_draft_that_left_nothing_for_the_rest_still_learns_to() -> None:
    """1 - Σ q is 0 in 32 bits here; the pull towards the rest must not be lost with it."""
    logits = torch.tensor([[20.0, 20, 0, 0, 0, 0, 0]], requires_grad=True)
    labels = Labels(torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.25]]), torch.tensor([0.5]))
    loss_of(logits, labels).sum().backward()
    assert logits.grad is not None and (logits.grad[0, 2:] < 0).all()


def test_a_listed_token_without_probability_belongs_to_the_rest() -> None:
    """Tokens that a draft does not know share an id with the one that stands for them, at no probability."""
    logits = torch.tensor([[1.0, 2, 3, 0, 0, 0, 0]])
    plain = Labels(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.2]]), torch.tensor([0.3]))
    ids, probs = torch.tensor([[0, 1, 6, 6, 6]]), torch.tensor([[0.5, 0.2, 0.0, 0.0, 0.0]])
    found = loss_of(logits, Labels(ids, probs, plain.rest))
    assert found == pytest.approx(loss_of(logits, plain))


# What a draft is worth


def along(matches: Sequence[bool]) -> Predictions:
    return Predictions(np.ones(len(matches), dtype=np.float32), np.array(matches, dtype=np.bool_))


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_a_draft_is_worth_the_best_length_of_drafts_from_everywhere(seed: int, most: int) -> None:
    random = np.random.default_rng(seed)
    answers = [along((random.random(int(random.integers(1, 40))) < 0.6).tolist()) for _ in range(5)]
    costs = StepCosts(tuple(np.cumsum(random.random(most + 1) ** 3 + 0.05)), float(random.random() * 0.1))
    speeds = [1.0]
    for length in range(1, most + 1):
        tokens = [
            1 + [*answer.matches[at : at + length].tolist(), False].index(False)
            for answer in answers
            for at in range(len(answer.matches))
        ]
        speeds.append(float(np.mean(tokens)) / costs.ratio(length))
    assert expected_speedup(answers, costs) == pytest.approx(max(speeds))


def test_drafts_that_are_never_right_and_no_answers_are_worth_plain_decoding() -> None:
    costs = StepCosts((1.0, 1.1, 1.2), 0.01)
    assert expected_speedup([along([False] * 30)], costs) == 1.0
    assert expected_speedup([], costs) == expected_speedup([along([])], costs) == 1.0
    assert expected_speedup([along([True] * 9)], StepCosts((1.0,), 0.1)) == 1.0


# The layers that a draft begins with

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
    network = Network.of(model, CPU)
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


def test_layers_are_chosen_for_what_a_draft_can_say(model: Checkpoint) -> None:
    idle = changed(model, (2, 3), 1e-4)
    subset = Subset.of(range(0, model.shape.vocabulary, 2), model.shape.vocabulary)
    assert best_layers(restrict(idle, subset), subset, answers(idle), 4) == [0, 1, 4, 5]


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
