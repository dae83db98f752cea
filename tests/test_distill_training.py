"""Training a tiny draft for a tiny target: that it learns, stops in time, and goes on after a kill."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny products take longer on more

from distilling import PROVENANCE, random_weights
from engines import END, VOCABULARY, asked
from llama_cpp_models import SMALL
from outrider.backends.fake import FakeModel, random_logits
from outrider.backends.gguf.model import GgufModel, Weights
from outrider.core.errors import InputError
from outrider.core.params import SamplingParams
from outrider.costs.expected_speed import StepCosts
from outrider.drafters.model import ModelDrafter
from outrider.engine import Engine
from outrider.lab.distill import evaluation, train
from outrider.lab.distill.checkpoint import Checkpoint, keep_layers, read_gguf, restrict
from outrider.lab.distill.corpus import Text, text_of
from outrider.lab.distill.evaluation import predictions_of
from outrider.lab.distill.examples import Example, example_path, read_example
from outrider.lab.distill.export import write_gguf
from outrider.lab.distill.generate import generate
from outrider.lab.distill.network import Network
from outrider.lab.distill.on_policy import OnPolicy
from outrider.lab.distill.questions import Question
from outrider.lab.distill.report import Evaluation
from outrider.lab.distill.train import ROUNDED, Trainer, TrainingSettings, rounded
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
SETTINGS = TrainingSettings(steps=12, batch_tokens=256, learning_rate=3e-3, evaluate_every=4)


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
        for i in range(200)
    ]  # fmt: skip
    generate(LoadedTarget("teacher", native), questions, folder, max_tokens=40)
    examples = [read_example(example_path(folder, question.id)) for question in questions]
    yield Teacher(
        checkpoint, native,
        [example for i, example in enumerate(examples) if i % 8 not in (0, 1)],
        [example for i, example in enumerate(examples) if i % 8 in (0, 1)],
    )  # fmt: skip
    weights.close()


def trainer_of(teacher: Teacher, folder: Path, settings: TrainingSettings = SETTINGS, **more: Any) -> Trainer:
    subset = more.pop("subset", Subset.whole(teacher.native.vocabulary.size))
    training, held_out = teacher.texts(subset)
    start = more.pop("start", restrict(keep_layers(teacher.checkpoint, (0,)), subset))
    own = None
    if settings.on_policy:
        own = OnPolicy(
            teacher.training, teacher.native, subset, num_texts=4, max_tokens=CONTEXT, seed=0
        ).texts
    folder.mkdir(exist_ok=True)
    return Trainer(start, training, held_out, PRICES, settings, folder, own_texts=own, **more)


def agreeing(trainer: Trainer, draft: Checkpoint) -> tuple[int, int]:
    """Of the held-out greedy answers' tokens: how many are what the draft finds most likely, of how many.
    Worked out one answer at a time."""
    network = Network.of(draft, CONTEXT, dtype=torch.float32, device=CPU)
    agree = total = 0
    for text in trainer._held_out:
        if text.is_greedy:
            with torch.inference_mode():
                states = network.states(torch.from_numpy(text.tokens).long()[None])
                rows = network.logits(states[0, -len(text.ids) :]).numpy()
            agree += int((rows.argmax(-1) == text.ids[:, 0]).sum())
            total += len(text.ids)
    return agree, total


# Learning


def test_a_draft_learns_what_its_target_says(teacher: Teacher, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=40, batch_tokens=768, evaluate_every=20)
    trainer = trainer_of(teacher, tmp_path, settings)
    before, total = agreeing(trainer, trainer.best())
    said: list[int] = []
    best = trainer.run(lambda trainer: said.append(trainer.state.step))
    after, _ = agreeing(trainer, best)
    assert total > 900 and before < 0.25 * total, (before, total)
    assert after > 1.4 * before and after > 0.3 * total, (before, after, total)
    first, *_, last = trainer.state.history
    assert first.agreement == pytest.approx(before / total, abs=2 / total)
    assert last.loss < 0.7 * first.loss and last.acceptance > first.acceptance + 0.1
    assert last.train_loss is not None and last.train_loss < last.loss
    assert said == list(range(1, 41)) and trainer.is_over
    assert trainer.state.trained_tokens > 40 * 300


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
    teacher: Teacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluations: list[tuple[float, float]],
) -> None:
    scripted = iter(evaluations)

    def evaluate(*_: Any) -> Evaluation:
        agreement, speedup = next(scripted)
        return Evaluation(
            step=0, train_loss=None, loss=1.0, acceptance=0.5, agreement=agreement, speedup=speedup
        )

    monkeypatch.setattr("outrider.lab.distill.train.evaluate", evaluate)
    trainer = trainer_of(teacher, tmp_path, replace(SETTINGS, steps=40, evaluate_every=2, patience=3))
    weights: list[dict[str, Any]] = []
    best = trainer.run(
        lambda t: weights.append({n: w.detach().clone() for n, w in t.network.weights.items()})
    )
    assert trainer.state.step == 8 and trainer.state.best_step == 2, "three without a better one end it"
    for name, values in best.weights.items():
        np.testing.assert_array_equal(values, weights[1][name].numpy())
        assert name.endswith("norm.weight") or not np.array_equal(values, weights[-1][name].numpy())


def test_padding_and_batches_change_no_evaluation(teacher: Teacher, tmp_path: Path) -> None:
    found = []
    long = replace(SETTINGS, steps=400, evaluate_every=400)  # all held-out answers are judged
    for batch_tokens in (64, 256, 4096):
        trainer = trainer_of(teacher, tmp_path, replace(long, batch_tokens=batch_tokens))
        trainer._evaluate()
        found.append(trainer.state.history[0])
    for other in found[1:]:
        both = [{k: v for k, v in asdict(e).items() if v is not None} for e in (other, found[0])]
        assert both[0] == pytest.approx(both[1], rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(("steps", "judged"), [(2, 17), (400, 50)])
def test_evaluations_of_a_short_training_are_of_fewer_answers(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, judged: int
) -> None:
    # All of them would take longer than the training itself.
    counts = []

    def evaluate(texts: Sequence[Text], *given: Any) -> Evaluation:
        counts.append(len(texts))
        return found(texts, *given)

    found = evaluation.evaluate
    monkeypatch.setattr(train, "evaluate", evaluate)
    settings = replace(SETTINGS, steps=steps, evaluate_every=steps)
    trainer = trainer_of(teacher, tmp_path / "run", replace(settings, patience=1))
    monkeypatch.setattr(trainer, "_step", lambda _batch: setattr(trainer.state, "step", steps))
    trainer.run()
    assert counts == [judged, judged] and len(teacher.held_out) == 50
    assert len(trainer.predictions()) == 25, "what is known of a draft is of all greedy ones"


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


# Killed and taken up again


class Killed(Exception):
    pass


def kill_at(step: int) -> Callable[[Trainer], None]:
    def said(trainer: Trainer) -> None:
        if trainer.state.step == step:
            raise Killed

    return said


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All but the first evaluation's training loss, which there is none of."""
    return asdict(trainer.state) | {"history": [repr(found) for found in trainer.state.history]}


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        (SETTINGS, [(2, 4, 7), (11,)]),
        (replace(SETTINGS, on_policy=0.7), [(6, 9)]),
        (replace(SETTINGS, quant="Q4_0", embedding_quant="Q8_0"), [(5,)]),
    ],
    ids=["the target's text", "the draft's own", "rounded"],
)
def test_a_training_that_was_killed_ends_as_if_it_had_not(
    teacher: Teacher, tmp_path: Path, settings: TrainingSettings, times: list[tuple[int, ...]]
) -> None:
    whole = trainer_of(teacher, tmp_path / "whole", settings)
    expected = whole.run()
    for kills in times:
        folder = tmp_path / f"killed at {kills}"
        for step in kills:
            with pytest.raises(Killed):
                trainer_of(teacher, folder, settings).run(kill_at(step))
        resumed = trainer_of(teacher, folder, settings)
        assert resumed.state.step == max(kills) // 4 * 4, "from the last evaluation on"
        best = resumed.run()
        assert state_of(resumed) == state_of(whole)
        for name, weight in whole.network.weights.items():
            assert torch.equal(weight, resumed.network.weights[name]), name
            np.testing.assert_array_equal(best.weights[name], expected.weights[name])
    again = trainer_of(teacher, tmp_path / "whole", settings)
    assert again.is_over and again.run().weights.keys() == expected.weights.keys()
    assert state_of(again) == state_of(whole), "what is over is not trained again"


def test_a_checkpoint_of_another_training_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    trainer_of(teacher, tmp_path).run()
    other = replace(SETTINGS, learning_rate=1e-4, seed=3)
    with pytest.raises(InputError, match=r"other settings \(learning_rate, seed\)") as raised:
        trainer_of(teacher, tmp_path, other)
    assert raised.value.what == str(tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match="another shape"):
        trainer_of(teacher, tmp_path, start=teacher.checkpoint)
    thin = random_weights(teacher.checkpoint, replace(teacher.checkpoint.shape, layers=1, width=32), 0)
    with pytest.raises(InputError, match="another shape"):
        trainer_of(teacher, tmp_path, start=thin)


def test_a_damaged_checkpoint_is_named(teacher: Teacher, tmp_path: Path) -> None:
    trainer_of(teacher, tmp_path).run()
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    torch.save({"weights": {}}, path)
    other_content = path.read_bytes()
    for damaged in (other_content, whole[:-500], b"", b"no checkpoint", b"PK" * 300 + whole[600:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged") as raised:
            trainer_of(teacher, tmp_path)
        assert raised.value.what == str(path) and "starts again" in raised.value.way_out


# The draft's own text


def small_network(vocabulary: int, like: Checkpoint) -> Network:
    made = random_weights(like, replace(like.shape, layers=1, vocabulary=vocabulary), 0)
    return Network.of(made, 1, dtype=torch.float32, device=CPU)


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
    target = FakeModel(VOCABULARY, LANGUAGE)
    subset = Subset.of([0, 2, END], 6)
    own = OnPolicy([letters(3, 9)], target, subset, num_texts=8, max_tokens=60, seed=5)
    for text in own.texts(small_network(4, teacher.checkpoint), 0):
        assert 3 not in text.tokens[-len(text.ids) + 1 :].tolist() or len(text.ids) == 1


# Evaluation


def test_a_token_that_is_not_known_is_never_a_match() -> None:
    text = Text(
        "c", np.zeros(3, dtype=np.int32), np.array([[0, 3], [3, 3], [3, 3]], dtype=np.int32),
        np.array([[0.9, 0], [0, 0.9], [0, 0.9]], dtype=np.float16), np.zeros(3, dtype=np.float16), True, True,
    )  # fmt: skip
    logits = torch.tensor([[4.0, 0, 0, 0], [0, 0, 0, 9], [9, 0, 0, 0]])
    confidences, tokens = logits.softmax(-1).max(-1)
    twice = (torch.cat([found, found]) for found in (confidences, tokens))
    [found] = predictions_of([text, replace(text, is_greedy=False)], *twice)
    assert found.matches.tolist() == [True, False, False]
    assert found.confidences == pytest.approx([0.948, 0, 0.9996], abs=1e-3)
    [whole] = predictions_of([replace(text, has_other=False)], confidences, tokens)
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
    trainer = trainer_of(teacher, tmp_path, replace(SETTINGS, steps=16), subset=subset)
    written = write_gguf(
        trainer.run(), tmp_path / "draft.gguf", subset=subset, target=vocabulary, provenance=PROVENANCE,
        quantization="F32", embedding_quantization="F32",
    )  # fmt: skip
    weights = Weights(written.path, SMALL)
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
