"""`outrider distill`: which questions are asked, the target's answers to them, batches of these; and the
command as its users run it."""

import itertools
import json
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

# What is imported below needs it, and it need not be installed.
# ruff: noqa: E402
torch = pytest.importorskip("torch")

from bench_models import card
from cli_helpers import TEMPLATE, Call, Outcome, result
from engines import END, VOCABULARY, greedy_continuation
from outrider.backends.fake import FakeModel, random_logits
from outrider.backends.tuning import costs_of
from outrider.core.data import Grammar
from outrider.core.errors import InputError, SettingError
from outrider.lab import check
from outrider.lab.distill import corpus, run, train
from outrider.lab.distill.answers import (
    Example,
    Question,
    asked,
    example_path,
    generate,
    read_example,
    write_example,
)
from outrider.lab.distill.checkpoint import Checkpoint
from outrider.lab.distill.corpus import Text, batch_of, batches, text_of
from outrider.lab.distill.plan import Data, DistillPlan, DistillSettings, claim
from outrider.lab.distill.run import Material
from outrider.lab.loaded import LoadedTarget
from outrider.lab.models import ModelFile
from outrider.lab.prompts import Prompt, conversation_hash, is_held_out
from outrider.lab.workloads import BUILT_IN, load_workload
from outrider.lab.written import written_prompts
from outrider.models.header import read_header
from outrider.models.vocab.subset import Subset
from outrider.policy.state import CALIBRATION_KEY
from tiny_gguf import write_tiny

pytestmark = pytest.mark.usefixtures("trusted")

TALKATIVE = random_logits(VOCABULARY.size, seed=4, order=3)
CPU = torch.device("cpu")


def speaking(**options: Any) -> LoadedTarget:
    return LoadedTarget("fake", FakeModel(VOCABULARY, TALKATIVE, **options))


def question(text: str, temperature: float = 0.0, **more: Any) -> Question:
    return Question(Prompt(id=text, messages=text, **more), "letters", temperature)


def some_questions(count: int, temperatures: Sequence[float] = (0.0,), seed: int = 0) -> list[Question]:
    random = np.random.default_rng(seed)
    texts = ["".join(random.choice(list("abcd "), size=int(random.integers(1, 40)))) for _ in range(count)]
    return [question(text, temperatures[i % len(temperatures)]) for i, text in enumerate(texts)]


def answers_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def found_in(folder: Path, asked: Question) -> Example:
    return read_example(example_path(folder, asked.id))


class Told:
    """Remembers what it is told; gives up after so many answers."""

    def __init__(self, most: int | None = None) -> None:
        self.passed_over: list[str] = []
        self.tokens: list[int] = []
        self._most = most

    def __call__(self, why: str, tokens: int) -> None:
        self.passed_over += [why] if why else []
        self.tokens += [] if why else [tokens]
        if len(self.tokens) == self._most:
            raise KeyboardInterrupt


# Answers


def test_greedy_answers_are_those_of_plain_decoding(tmp_path: Path) -> None:
    questions = some_questions(30)
    said = Told()
    generate(speaking(max_sequences=5), questions, tmp_path, max_tokens=25, on_done=said)
    for each in questions:
        example = found_in(tmp_path, each)
        prompt = VOCABULARY.tokenize(each.prompt.id)
        expected = greedy_continuation(TALKATIVE, prompt, 25)
        if END in expected:
            expected = expected[: expected.index(END) + 1]
        assert (example.prompt.tolist(), example.answer.tolist()) == (prompt, expected)
        assert example.text == b"".join(map(VOCABULARY.piece, expected)).decode()
        assert (example.id, example.category, example.temperature) == (each.id, "letters", 0.0)
    lengths = {len(found_in(tmp_path, each).answer) for each in questions}
    assert 25 in lengths and len(lengths) > 3, "some end by themselves, some at the limit"
    assert sum(said.tokens) == sum(len(found_in(tmp_path, each).answer) for each in questions)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("top", [3, 64])
def test_labels_are_the_probabilities_of_the_model(tmp_path: Path, temperature: float, top: int) -> None:
    each = question("abca", temperature)
    generate(speaking(), [each], tmp_path, max_tokens=20, top=top)
    example = found_in(tmp_path, each)
    text = example.prompt.tolist()
    for i, token in enumerate(example.answer.tolist()):
        logits = TALKATIVE(text).astype(np.float64)
        probs = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-probs)[: min(top, VOCABULARY.size)]
        assert example.ids[i].tolist() == order.tolist() and token in order
        assert np.exp(example.log_probs[i].astype(float)) == pytest.approx(probs[order], rel=2e-3)
        assert float(example.rest[i]) == pytest.approx(1 - probs[order].sum(), abs=1e-3)
        text.append(token)
    assert example.ids.shape == (len(example.answer), min(top, VOCABULARY.size))


def test_drawn_answers_depend_on_seed_and_question_alone(tmp_path: Path) -> None:
    questions = some_questions(24, (0.7, 1.3))
    runs = {}
    for name, options, order, seed in (
        ("one", {"max_sequences": 1}, questions, 3),
        ("many", {"max_sequences": 9, "max_batch_tokens": 50}, questions[::-1], 3),
        ("other seed", {"max_sequences": 9}, questions, 4),
    ):
        (tmp_path / name).mkdir()
        generate(speaking(**options), order, tmp_path / name, max_tokens=15, seed=seed)
        runs[name] = answers_in(tmp_path / name)
    assert len(runs["one"]) == 24 and runs["one"] == runs["many"]
    assert runs["other seed"].keys() == runs["one"].keys() and runs["other seed"] != runs["one"]


def test_a_grammar_without_a_way_on_passes_its_question_over(tmp_path: Path) -> None:
    target = speaking(max_sequences=2)
    stuck = question("abca", grammar=Grammar("choice", '["caé"]'), follow_ups=("b",))
    questions = [question("ab"), stuck, question("dca"), question("bd")]
    said = Told()
    generate(target, questions, tmp_path, max_tokens=12, on_done=said)
    assert len(said.tokens) == 3 and not example_path(tmp_path, stuck.id).exists()
    [why] = said.passed_over
    assert "no token that may follow" in why


def test_follow_ups_are_asked_behind_the_answers(tmp_path: Path) -> None:
    first = question("ab", follow_ups=("cc", "d"))
    generate(speaking(), [question("dd"), first, question("bbb")], tmp_path, max_tokens=9)
    assert len(answers_in(tmp_path)) == 5
    text = "ab"
    for turn, after in enumerate(("cc", "d", "")):
        example = found_in(tmp_path, replace(first, turn=turn))
        assert example.prompt.tolist() == VOCABULARY.tokenize(text)
        text += f"{example.text}\n\n{after}"


@pytest.mark.parametrize("most", [1, 7, 16])
def test_a_generation_that_was_killed_goes_on_to_the_same_answers(tmp_path: Path, most: int) -> None:
    questions = [*some_questions(14, (0.0, 0.8)), question("aa", 0.8, follow_ups=("b", "c")), question("cb")]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    generate(speaking(), questions, whole, max_tokens=14)
    target = speaking()
    with pytest.raises(KeyboardInterrupt):
        generate(target, questions, parts, max_tokens=14, on_done=Told(most))
    assert len(answers_in(parts)) == most
    said = Told()
    generate(target, questions, parts, max_tokens=14, on_done=said)
    assert answers_in(parts) == answers_in(whole) and len(said.tokens) == 18
    assert said.tokens.count(0) == most, "those that were there were not answered again"
    assert all(target.model.length(sequence) == 0 for sequence in range(4))


def test_prompts_that_do_not_fit_are_passed_over_and_named(tmp_path: Path) -> None:
    target = speaking(context_length=32, max_batch_tokens=15)
    said = Told()
    questions = [question("ab" * 16), question("abcd" * 20), question("abc" * 10), question("")]
    generate(target, questions, tmp_path, max_tokens=50, on_done=said)
    [example] = map(read_example, tmp_path.iterdir())
    assert len(example.prompt) == 30 and len(example.answer) <= 2
    assert sum("tokens do not fit a context of 32" in why for why in said.passed_over) == 2
    assert sum("no tokens" in why or "empty" in why for why in said.passed_over) == 1, said.passed_over


def test_a_grammar_holds_in_recorded_answers(tmp_path: Path) -> None:
    choices = ["abcd", "bad cab", "dada"]
    grammar = Grammar("choice", json.dumps(choices))
    questions = [question(text, t, grammar=grammar) for text in ("ab", "cd", "d") for t in (0.0, 1.0)]
    generate(speaking(max_sequences=3), [*questions, question("bb")], tmp_path, max_tokens=60)
    examples = [found_in(tmp_path, each) for each in questions]
    assert {example.text for example in examples} <= set(choices)
    assert any(example.ids[0, 0] != example.answer[0] for example in examples), "what is ruled out counts too"
    for example in examples:
        total = np.exp(example.log_probs.astype(float)).sum(-1) + example.rest.astype(float)
        assert total == pytest.approx(1, abs=5e-3)


# Answers on disk


def example_of(tokens: int = 5, **more: Any) -> Example:
    random = np.random.default_rng(tokens)
    probs = random.dirichlet(np.ones(7), tokens)
    ids = np.argsort(-probs)[:, :4].astype(np.int32)
    taken = np.take_along_axis(probs, ids, -1)
    values: dict[str, Any] = {
        "id": "an id / with ünusual\ncharacters", "category": "c", "temperature": 0.7, "text": "tëxt \ufffd",
        "prompt": np.arange(3, dtype=np.int32), "answer": ids[:, 0].copy(), "ids": ids,
        "log_probs": np.log(taken).astype(np.float16), "rest": (1 - taken.sum(-1)).astype(np.float16),
    }  # fmt: skip
    return Example(**values | more)


def test_an_answer_comes_back_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    write_example(tmp_path, example := example_of())
    [path] = tmp_path.iterdir()
    found = read_example(example_path(tmp_path, example.id))
    assert (found.id, found.category, found.text) == (example.id, "c", "tëxt \ufffd")
    assert found.temperature == 0.7
    for name in ("prompt", "answer", "ids", "log_probs", "rest"):
        np.testing.assert_array_equal(getattr(found, name), getattr(example, name))
        assert getattr(found, name).dtype == getattr(example, name).dtype
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:100] + b"x" * 50 + whole[150:], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged") as raised:
            read_example(path)
        assert raised.value.what == str(path) and "made again" in raised.value.way_out


# Texts and batches


def test_what_the_draft_does_not_know_is_one_token() -> None:
    example, subset = example_of(), Subset.of([0, 2, 5], 7)
    text = text_of(example, subset, 100)
    assert text is not None and text.has_other
    assert text.tokens.tolist() == subset.to_draft[[0, 1, 2, *example.answer[:-1]]].tolist()
    for i in range(5):
        probs = np.exp(example.log_probs[i].astype(float))
        expected = {
            int(subset.to_draft[t]): p for t, p in zip(example.ids[i], probs, strict=True) if t in (0, 2, 5)
        }
        expected[3] = 1 - sum(expected.values()) - float(example.rest[i])
        found: dict[int, float] = {}
        for token, p in zip(text.ids[i].tolist(), text.probs[i].tolist(), strict=True):
            if p:
                assert token not in found, "no token is labelled twice"
                found[token] = p
        assert found == pytest.approx({token: p for token, p in expected.items() if p > 1e-2}, abs=5e-3)


@pytest.mark.parametrize(("window", "most"), [(0, 100), (4, 100), (20, 100), (0, 7), (2, 4), (0, 1)])
def test_a_text_is_the_end_of_an_answer_behind_what_is_read_of_its_prompt(window: int, most: int) -> None:
    prompt, nothing = np.arange(9, dtype=np.int32) % 7, cast("Checkpoint", None)
    example = example_of(5, prompt=prompt)
    [text] = Material(nothing, Subset.whole(7), [], [], window).texts([example], most)
    assert text.tokens.tolist() == [*prompt[-window:], *example.answer[:-1]][-most:]
    labels = min(most, 5)
    assert text.ids[:, :-1].tolist() == example.ids[-labels:].tolist()
    assert len(text.probs) == len(text.rest) == labels and not text.has_other and not text.is_greedy
    sums = text.probs.astype(float).sum(-1) + text.rest.astype(float)
    assert sums == pytest.approx(1, abs=2e-3) and (text.probs[:, -1] == 0).all(), "nothing is unknown"


def many_texts(count: int = 60) -> list[Text]:
    random = np.random.default_rng(2)
    made = []
    for i in range(count):
        prompt = random.integers(0, 7, int(random.integers(1, 50))).astype(np.int32)
        text = text_of(example_of(int(random.integers(1, 30)), prompt=prompt), Subset.whole(7), 64)
        assert text is not None
        made.append(text if i % 2 else replace(text, tokens=text.tokens[-len(text.ids) :]))
    return made


def epochs_of(texts: list[Text], batch_tokens: int, seed: int, count: int = 1) -> list[list[list[int]]]:
    """The first epochs, told apart by their number of texts, which are named by their places."""
    found: list[list[list[int]]] = []
    places = {id(text): place for place, text in enumerate(texts)}
    groups = batches(texts, batch_tokens, seed)
    for _ in range(count):
        epoch: list[list[int]] = []
        while sum(map(len, epoch)) < len(texts):
            epoch.append([places[id(text)] for text in next(groups)])
        found.append(epoch)
    return found


def test_every_epoch_has_every_text_once_in_batches_that_fit() -> None:
    texts = many_texts()
    first, second = epochs_of(texts, 200, seed=1, count=2)
    for epoch in (first, second):
        assert sorted(i for batch in epoch for i in batch) == list(range(60))
        padded = [max(len(texts[i].tokens) for i in batch) * len(batch) for batch in epoch]
        assert max(padded) <= 200
        assert sum(padded) < 1.35 * sum(len(text.tokens) for text in texts), "little is padding"
    assert first != second and {frozenset(b) for b in first} != {frozenset(b) for b in second}
    assert epochs_of(many_texts(), 200, seed=1, count=2) == [first, second]
    assert epochs_of(many_texts(), 200, seed=2) != [first]


def test_a_batch_has_each_label_at_the_token_before_it() -> None:
    texts = many_texts(5)
    narrow = replace(texts[0], ids=texts[0].ids[:, 1:], probs=texts[0].probs[:, 1:])
    batch = batch_of([narrow, *texts[1:]], CPU)
    flat, at = batch.tokens.flatten(), 0
    for row, text in enumerate([narrow, *texts[1:]]):
        size = len(text.ids)
        assert batch.tokens[row, : len(text.tokens)].tolist() == text.tokens.tolist()
        assert flat[batch.places[at : at + size]].tolist() == text.tokens[-size:].tolist()
        columns = text.ids.shape[1]
        assert batch.labels.ids[at : at + size, :columns].tolist() == text.ids.tolist()
        assert batch.labels.probs[at : at + size, :columns].numpy() == pytest.approx(text.probs.astype(float))
        assert not batch.labels.probs[at : at + size, columns:].any()
        assert batch.labels.rest[at : at + size].tolist() == text.rest.tolist()
        at += size
    assert at == len(batch.places) == len(batch.labels.ids)


# Questions


def test_no_bundled_prompt_that_trains_is_one_that_measures() -> None:
    found = asked(Data(num_prompts=2000))
    training = {conversation_hash(q.prompt) for q in found.training}
    held_out = {conversation_hash(q.prompt) for q in found.held_out}
    workloads = [load_workload(name) for name in BUILT_IN]
    built_in = {conversation_hash(prompt) for workload in workloads for prompt in workload.prompts}
    assert len(built_in) > 50 and len(held_out) > 80
    assert not training & held_out and not (training | held_out) & built_in
    assert len(found.training) + len(found.held_out) == 2000
    assert all(is_held_out(q.prompt) for q in found.held_out)
    bundled = {conversation_hash(w.prompt) for w in written_prompts(2000)}
    assert training | held_out == bundled


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n', encoding="utf-8")
    with pytest.raises(SettingError, match="one of sixteen is held out"):
        asked(Data(prompts=[str(path)]))


@pytest.mark.parametrize("temps", ["0,0,0.7", "0.7", "1,0"])
def test_some_held_out_answers_are_greedy_whatever_the_temperatures(temps: str) -> None:
    found = asked(Data(num_prompts=200, temps=temps))
    assert found.held_out[0].temperature == 0
    assert {q.temperature for q in found.training} == set(map(float, temps.split(",")))


def test_questions_that_differ_in_anything_that_is_asked_have_answers_of_their_own() -> None:
    plain = question("ab")
    variants = [
        plain, question("ab", 0.5), question("ab", max_tokens=5), question("ab", grammar=Grammar("json")),
        question("ab", follow_ups=("c",)), replace(question("ab", follow_ups=("c",)), turn=1),
        Question(Prompt(id="ab", messages="abc"), "letters", 0.0), question("ac"),
        question("ab", tools=({"name": "t"},)),
    ]  # fmt: skip
    assert len({variant.id for variant in variants}) == len(variants)
    assert plain.id == replace(plain, category="other").id


# The plan


def plan_of(place: Path, **data: Any) -> DistillPlan:
    file = ModelFile("target", Path("target.gguf"), card("target"), "")
    return DistillPlan(file, place / "out", DistillSettings(**data))


def test_a_folder_belongs_to_the_plan_that_claimed_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    claim(plan)
    claim(plan)
    claim(plan_of(tmp_path, threads=7))
    other = plan_of(tmp_path, seed=1, minutes=3)
    with pytest.raises(InputError, match=r"training\.minutes, training\.seed differ") as raised:
        claim(other)
    assert raised.value.what == str(plan.out)
    for damage in ("", "[1, 2]", "{", '"x"'):
        (plan.out / "plan.json").write_text(damage, encoding="utf-8")
        with pytest.raises(InputError, match="damaged"):
            claim(plan)


def test_answers_are_shared_only_by_plans_that_would_make_the_same(tmp_path: Path) -> None:
    shared = tmp_path / "answers"
    first = plan_of(tmp_path / "a", answers=shared)
    claim(first)
    claim(plan_of(tmp_path / "b", answers=shared, num_prompts=50, temps="0"))
    with pytest.raises(InputError, match=r"made otherwise \(data\.max_tokens differ\)") as raised:
        claim(plan_of(tmp_path / "c", answers=shared, max_tokens=9))
    assert raised.value.what == str(shared)
    with pytest.raises(InputError, match=r"\(target differ"):
        plan = plan_of(tmp_path / "d", answers=shared)
        claim(replace(plan, file=replace(plan.file, path=Path("other.gguf"))))


# The command as its users run it, on tiny models

WORDS = ("the", "rain", "a", "stone", "king", "shore", "in", "on", "and", "other", "hand", "there", "he")
TRAINING = ("--steps", "3", "--batch-tokens", "256")
SHAPE = ("--layers", "1", "--vocabulary", "280")
PLAINLY = ("--quant", "F32", "--embedding-quant", "F32")
"""Without llama.cpp's quantizer, which takes half a second for any file."""
DATA = ("--prompts", "prompts.jsonl", "--max-tokens", "16", "-c", "128", "-t", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "other.gguf", padding=3)
    words = random.Random(0)
    prompts = [{"id": str(i), "prompt": " ".join(words.choices(WORDS, k=6))} for i in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def distill(outrider: Call, monkeypatch: pytest.MonkeyPatch, models: Path) -> Call:
    """The command among the tiny models; what calls cost is measured for a moment only."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("OUTRIDER_CACHE", str(models / "cache"))
    monkeypatch.setattr(run, "costs_of", partial(_soon, costs_of))
    monkeypatch.setattr(run, "MEASURING_SECONDS", 2.0)
    monkeypatch.setattr(check, "DEFAULT_SECONDS", 0.1)
    return partial(outrider, "distill")


def _soon(measure_costs: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return measure_costs(*given, **named | {"seconds": 0.1})


def as_json(outcome: Outcome) -> dict[str, Any]:
    shown = result(outcome)
    assert shown["schema"] == "outrider.distill/1"
    return shown


@pytest.mark.slow
def test_a_draft_is_made_and_reported_on(distill: Call, models: Path) -> None:
    outcome = distill("-m", "target.gguf", *DATA, *SHAPE, *TRAINING, "--json", "-o", "a")
    shown, made = as_json(outcome), models / "a" / "target-draft.gguf"
    assert shown["path"] == "a/target-draft.gguf" and shown["file_bytes"] == made.stat().st_size
    assert (shown["known_tokens"], shown["target_tokens"]) == (279, 289)
    assert shown["shape"]["layers"] == 1 and shown["settings"]["draft.quant"] == "Q4_0"
    assert read_header(made).text(CALIBRATION_KEY), "how its tokens fare"
    assert shown["training_answers"] + shown["held_out_answers"] == 48 and shown["held_out_answers"] >= 1
    assert 0.9 < shown["coverage"] <= 1
    assert shown["steps"] == 3 and len(shown["history"]) >= 2
    measured = shown["measured"]
    trained, first = measured["drafts"]
    assert [draft["model"]["name"] for draft in (trained, first)] == ["target-draft", "first"]
    answers = sum(measured["answers"].values())
    assert answers <= shown["held_out_answers"] and measured["lookup"]["over_plain"]["value"] > 0
    for draft in (trained, first):
        assert 0 < draft["answers"] <= answers and draft["positions"] and 0 <= draft["agreement"] <= 1
    assert "training: " in outcome.err and "\x1b" not in outcome.err
    assert json.loads((models / "a" / "report.json").read_text()) == shown


@pytest.mark.slow
def test_another_run_takes_the_answers(distill: Call, models: Path) -> None:
    usual = ("-m", "target.gguf", *DATA, "--answers", "shared", *TRAINING, *PLAINLY, *SHAPE)
    first = distill(*usual, "--no-report", "-o", "b")
    assert first.status == 0 and "report" not in first.out and not list((models / "b").glob("report*"))
    assert "outrider run -m target.gguf -md b/target-draft.gguf" in first.out
    answers = {path.name: path.stat().st_mtime_ns for path in (models / "shared").glob("*.npz")}
    outcome = distill(*usual, "--base", "target.gguf", "-o", "c")
    assert outcome.status == 0, outcome.err
    assert {path.name: path.stat().st_mtime_ns for path in (models / "shared").glob("*.npz")} == answers
    shown = json.loads((models / "c" / "report.json").read_text())
    assert shown["settings"]["base"] == "target.gguf" and shown["known_tokens"] == 279
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "outrider check target.gguf c/target-draft.gguf" in outcome.out


def test_ctrl_c_ends_a_training_with_the_best_so_far_and_before_it_keeps_the_answers(
    distill: Call, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, at, better = train.Trainer._step, 1, itertools.count(1.0)

    def interrupted(trainer: train.Trainer, *given: Any) -> None:
        if trainer.step == at:
            signal.raise_signal(signal.SIGINT)
        step(trainer, *given)

    monkeypatch.setattr(train.Trainer, "_step", interrupted)
    monkeypatch.setattr(train, "evaluate", lambda *_: corpus.Evaluation(0, 1.0, 0.5, 0.5, next(better)))
    usual = (
        "-m", "target.gguf", *DATA, *SHAPE, *PLAINLY, "--steps", "24", "--batch-tokens", "256",
        "--no-report", "--json", "-o", "stopped",
    )  # fmt: skip
    outcome = distill(*usual)
    assert outcome.status == 130 and outcome.out == ""
    said = "interrupted: the answers are kept in stopped/answers; the same command goes on with them"
    assert outcome.err.splitlines()[-1] == said
    assert not (models / "stopped" / "target-draft.gguf").exists()
    answers = sorted((models / "stopped" / "answers").iterdir())
    at = 5
    outcome = distill(*usual)
    shown = as_json(outcome)
    assert sorted((models / "stopped" / "answers").iterdir()) == answers
    assert (shown["steps"], shown["best_step"]) == (5, 4)
    assert "note: the training was interrupted at step 5; the draft is that of 4" in outcome.err
    assert (models / "stopped" / "target-draft.gguf").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-m", "nowhere.gguf"), "error: nowhere.gguf: "),
        (("-m", "prompts.jsonl"), "error: prompts.jsonl: "),
        (("--prompts", "no.jsonl"), "error: no.jsonl: "),
        (("--prompts", "code"), "error: --prompts code: drafts are measured on"),
        (("--temps", "0,warm"), "error: --temps: 0,warm cannot be used: "),
        (("--temps", "nan"), "error: --temps: nan cannot be used: "),
        (("--layers", "9"), "error: --layers 9: it has 2 layers"),
        (("--vocabulary", "200"), "error: vocabulary: 200 "),
        (("--steps", "0"), "error: --steps: 0 cannot be used: "),
        (("--on-policy", "2"), "error: --on-policy: 2 cannot be used: "),
        (("--window", "-1"), "error: --window: -1 cannot be used: "),
        (("--quant", "Q3"), "error: Q3: it is not a type to quantize to"),
        (("--base", "other.gguf"), "error: other.gguf: it knows 292 tokens, the target 289"),
        (("--base", "nowhere"), "error: nowhere: "),
        (("--steps", "3", "--minutes", "1"), "error: --steps and --minutes: "),
        (("--hf-repo", "a/b"), "error: -m and -hf: "),
        (("-c", "16"), "error: -c 16: "),
        (("-o", "prompts.jsonl"), "error: prompts.jsonl/answers: it cannot be made"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_answered(
    distill: Call, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    usual: tuple[str, ...] = () if "-m" in arguments else ("-m", "target.gguf")
    if "-o" not in arguments:
        arguments = (*arguments, "-o", str(tmp_path / "x"))
    if not {"-c", "--prompts"} & set(arguments):
        arguments = (*arguments, *DATA)
    outcome = distill(*usual, *arguments)
    assert outcome.status == 2 and outcome.out == ""
    assert outcome.err.splitlines()[-1].startswith(complaint), outcome.err
    assert not list(tmp_path.rglob("*.npz"))
