"""`outrider distill` as its users run it, on tiny models."""

import itertools
import json
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import TEMPLATE, Call, Outcome, result
from outrider.backends.tuning import costs_of
from tiny_gguf import write_tiny

pytest.importorskip("torch")

from outrider.lab import check
from outrider.lab.distill import corpus, run, train
from outrider.models.header import read_header
from outrider.policy.state import CALIBRATION_KEY

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
