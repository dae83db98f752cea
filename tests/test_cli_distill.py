"""`outrider distill` as its users run it, on tiny models."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from backends import MAINLINE
from cli_helpers import TEMPLATE, Outcome, call
from outrider.backends.gguf import guard, heads
from outrider.backends.tuning.scoring import costs_of
from tiny_gguf import write_tiny

pytest.importorskip("torch")

from distilled_reports import report as made_up
from outrider.cli.distill_report import StepInterrupt, TimeLeft, print_distilled, show_distilling
from outrider.lab.distill import evaluation, export, measure
from outrider.lab.distill.export import read_provenance
from outrider.lab.distill.report import Report
from outrider.models import read_card
from outrider.models.header import read_header
from outrider.policy.pretrained import CALIBRATION_KEY

Call = Callable[..., Outcome]

WORDS = (
    "the",
    "rain",
    "a",
    "stone",
    "king",
    "shore",
    "in",
    "on",
    "and",
    "other",
    "hand",
    "there",
    "was",
    "he",
)
TRAINING = ("--steps", "3", "--batch-tokens", "256")
SHAPE = ("--layers", "1", "--vocabulary", "280")
PLAINLY = ("--quant", "F16", "--embedding-quant", "F16")
"""Without llama.cpp's quantizer, which takes half a second for any file."""
DATA = ("--prompts", "prompts.jsonl", "--max-tokens", "16", "-c", "128", "-t", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf", chat_template=TEMPLATE)
    write_tiny(folder / "other.gguf", padding=3)
    write_tiny(folder / "hybrid.gguf", arch="qwen35", chat_template=TEMPLATE)
    words = random.Random(0)
    prompts = [{"id": str(i), "prompt": " ".join(words.choices(WORDS, k=6))} for i in range(48)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@pytest.fixture
def distill(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], models: Path) -> Call:
    """The command among the tiny models; what calls cost is measured for a moment only."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("OUTRIDER_CACHE", str(models / "cache"))
    monkeypatch.setattr(evaluation, "costs_of", partial(_soon, costs_of))
    monkeypatch.setattr(measure, "DEFAULT_SECONDS", 0.1)

    def run(*arguments: str) -> Outcome:
        return call(monkeypatch, capfdbinary, "distill", *arguments)

    return run


def _soon(measure_costs: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return measure_costs(*given, **named | {"seconds": 0.1})


def as_json(outcome: Outcome) -> dict[str, Any]:
    assert outcome.status == 0, outcome.err
    shown: dict[str, Any] = json.loads(outcome.out)
    assert shown["schema"] == "outrider.distill/1"
    Report.model_validate(shown)
    return shown


def test_a_draft_is_made_and_reported_on(distill: Call, models: Path) -> None:
    outcome = distill(
        "-m", "target.gguf", *DATA, *SHAPE, *TRAINING, "--teacher", "torch", "--json", "-o", "a"
    )
    shown = as_json(outcome)
    assert shown["draft"]["path"] == "a/target-draft.gguf" and (models / "a" / "target-draft.gguf").is_file()
    assert (shown["draft"]["known_tokens"], shown["draft"]["target_tokens"]) == (279, 289)
    assert shown["draft"]["layers"] == 1
    assert read_header(models / "a" / "target-draft.gguf").text(CALIBRATION_KEY), "how its tokens fare"
    assert shown["draft"]["file_bytes"] == (models / "a" / "target-draft.gguf").stat().st_size
    data = shown["data"]
    assert data["training_answers"] + data["held_out_answers"] == 48 and data["held_out_answers"] >= 1
    assert 0.9 < data["coverage"] <= 1
    assert shown["training"]["steps"] == 3 and len(shown["training"]["history"]) >= 2
    measured = shown["measured"]
    assert [found["kind"] for found in measured["contenders"]] == ["none", "lookup", "trained", "first"]
    assert measured["answers"] <= data["held_out_answers"] and measured["categories"].keys() == {"prompts"}
    trained = measured["contenders"][2]
    assert trained["answers"] == measured["answers"] and len(trained["agreement_by_position"]) == 8
    assert shown["learning_curve"] is None and "note: PyTorch answers, as asked" in outcome.err
    assert "training: " in outcome.err and "\x1b" not in outcome.err
    assert json.loads((models / "a" / "report.json").read_text()) == shown
    assert {path.name for path in (models / "a").glob("*.svg")} == {
        "report-training.svg", "report-positions.svg",
    }  # fmt: skip


@pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")
def test_a_head_is_made_reported_on_and_drafts(distill: Call, models: Path) -> None:
    usual = ("-m", "target.gguf", "--kind", "eagle3", *DATA, "--vocabulary", "280", *TRAINING, "-o", "head")
    shown = as_json(distill(*usual, "--learning-curve", "--json"))
    draft, (*_, trained, first) = shown["draft"], shown["measured"]["contenders"]
    assert (draft["kind"], draft["layers"], draft["known_tokens"]) == ("eagle3", 1, 279)
    assert (trained["kind"], first["kind"]) == ("trained", "first") and trained["step_ratio"] > 0
    assert len(trained["agreement_by_position"]) == 8 and len(shown["learning_curve"]["points"]) == 4
    kept = {path: path.stat().st_mtime_ns for path in (models / "head" / "answers").rglob("*.np?")}
    assert len(kept) == 2 * 48, "answers, and the states along them"
    file = models / "head" / "target-draft.gguf"
    assert read_card(file).kind == "eagle3" and read_header(file).text(CALIBRATION_KEY)
    again = as_json(distill(*usual, "--learning-curve", "--json"))
    assert again["training"]["history"] == shown["training"]["history"]
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    told = distill(*usual, "--no-report")
    assert "an EAGLE-3 head" in " ".join(told.out.split())


@pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")
def test_a_target_that_gives_no_states_is_named_before_it_answers(
    distill: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ("-m", "target.gguf", "--kind", "eagle3", *DATA, "--vocabulary", "280", *TRAINING, "-o", "none")
    monkeypatch.setattr(guard, "_first_calls", lambda *_given: -signal.SIGABRT)
    refused = distill(*usual)
    assert refused.status == 2 and refused.err.splitlines()[-1].startswith("error: target.gguf: ")
    assert "does not give the inputs of layers of llama models" in refused.err
    assert "Leave out --kind eagle3" in refused.err
    monkeypatch.setattr(heads, "_LAYER_SIGNATURES", {"llama_no_such_call": (None,)})
    refused = distill(*usual)
    assert refused.status == 2 and "runs no heads here: " in refused.err.splitlines()[-1]


@pytest.mark.skipif(not MAINLINE, reason="no library has the calls for heads")
def test_a_head_that_could_not_be_written_is_refused_before_the_target_answers(
    distill: Call, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_quantizer", lambda: (SimpleNamespace(backend="ik"), None))
    usual = ("-m", "target.gguf", "--kind", "eagle3", *DATA, "--vocabulary", "280", *TRAINING)
    refused = distill(*usual, "-o", "unwritten")
    assert refused.status == 2 and "Give --quant F16 --embedding-quant F16" in refused.err
    assert not [*(models / "unwritten" / "answers").glob("*.npz")]
    export.check_head_types("F16", "F16")


@pytest.mark.slow
def test_another_run_takes_the_answers_goes_on_with_a_draft_and_makes_a_curve(
    distill: Call, models: Path
) -> None:
    usual = ("-m", "target.gguf", *DATA, "--answers", "shared", "--teacher", "llama.cpp", *TRAINING, *PLAINLY)
    as_many_threads_as_suit = tuple(flag for flag in usual if flag not in ("-t", "1"))
    recorded = distill(*as_many_threads_as_suit, "--answers-only", "-o", "b", "--json")
    said = {"schema": "outrider.distill.answers/1", "folder": "shared", "answers": 48}
    assert json.loads(recorded.out) == said and not (models / "b").exists()
    first = distill(*usual, *SHAPE, "--no-report", "-o", "b", "--name", "small")
    assert first.status == 0 and "report" not in first.out and not list((models / "b").glob("report*"))
    assert "outrider run -m target.gguf -md b/small.gguf" in first.out
    answers = {path.name: path.stat().st_mtime_ns for path in (models / "shared").glob("*.npz")}
    outcome = distill(*usual, "--continue", "b/small.gguf", "--learning-curve", "-o", "c")
    assert outcome.status == 0, outcome.err
    assert {path.name: path.stat().st_mtime_ns for path in (models / "shared").glob("*.npz")} == answers
    shown = Report.model_validate_json((models / "c" / "report.json").read_text())
    assert shown.training.start == "continue" and shown.draft.known_tokens == 279
    assert shown.measured is not None and shown.measured.of("continued") is not None
    before, made = (read_provenance(models / path) for path in ("b/small.gguf", "c/target-draft.gguf"))
    assert before is not None and made is not None and before.tokens
    assert made.steps == before.steps + shown.training.best_step
    assert made.tokens == before.tokens + shown.training.trained_tokens
    assert made.data.endswith(f"; before that: {before.data}")
    curve = shown.learning_curve
    assert curve is not None and [point.answers for point in curve.points][-1] == shown.data.training_answers
    assert curve.points[0].tokens < curve.points[-1].tokens == shown.data.training_tokens
    larger = distill(
        *usual, "--continue", "b/small.gguf", "--vocabulary", "285", "--no-report", "-o", "e", "--json"
    )
    assert as_json(larger)["draft"]["known_tokens"] == 284
    assert "continued from" in outcome.out and "each doubling added" in " ".join(outcome.out.split())
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert not list((models / "c" / "curve").rglob("*.pt"))


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(
    distill: Call, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.lab.distill.train import Trainer

    step = Trainer._step

    def interrupted(trainer: Trainer, numbers: Any) -> None:
        if trainer.state.step == 4:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step, which is ended first
        step(trainer, numbers)

    usual = (
        "-m", "target.gguf", *DATA, *SHAPE, *PLAINLY, "--steps", "24", "--batch-tokens", "256",
        "--answers", "shared", "--teacher", "llama.cpp", "--no-report", "--json",
    )  # fmt: skip
    whole = as_json(distill(*usual, "-o", "whole"))
    monkeypatch.setattr(Trainer, "_step", interrupted)
    outcome = distill(*usual, "-o", "stopped")
    assert outcome.status == 130 and outcome.out == ""
    assert outcome.err.splitlines()[-1] == (
        "interrupted: what is done is kept in stopped; the same command goes on from there"
    )
    assert not (models / "stopped" / "target-draft.gguf").exists()
    monkeypatch.setattr(Trainer, "_step", step)
    (models / "stopped" / "prices.json").write_bytes((models / "whole" / "prices.json").read_bytes())
    on = distill(*usual, "-o", "stopped")
    # The fifth step was kept, though drafts are evaluated (and kept in any case) every other step.
    [begun, *_] = [line for line in on.err.splitlines() if line.startswith("training: ")]
    assert "step 6 of 24" in begun
    again = as_json(distill(*usual, "-o", "whole"))  # nothing is left to do
    losses = [[e["loss"] for e in shown["training"]["history"]] for shown in (as_json(on), whole, again)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-m", "nowhere.gguf"), "error: nowhere.gguf: "),
        (("-m", "prompts.jsonl"), "error: prompts.jsonl: "),
        (("--prompts", "no.jsonl"), "error: no.jsonl: "),
        (("--prompts", "code"), "error: --prompts code: drafts are measured on"),
        (("--temps", "0,warm"), "error: --temps 0,warm: "),
        (("--temps", "nan"), "error: --temps: "),
        (("--teacher", "nobody"), "error: --teacher nobody: "),
        (("--loss", "l2"), "error: --loss: "),
        (("--layers", "0"), "error: --layers 0: "),
        (("--layers", "9"), "error: --layers 9: it has 2 layers"),
        (("--vocabulary", "200"), "error: vocabulary: 200 "),
        (("--steps", "0"), "error: --steps 0: "),
        (("--on-policy", "2"), "error: --on-policy: "),
        (("--seed", "-1"), "error: --seed: -1 cannot be used: "),
        (("--window", "-1"), "error: --window -1: "),
        (("--quant", "Q3"), "error: "),
        (("--name", "a/b"), "error: --name 'a/b': "),
        (("--name", "first"), "error: --name 'first': "),
        (("--base", "other.gguf"), "error: other.gguf: it knows 292 tokens, the target 289"),
        (("--continue", "nowhere"), "error: nowhere: "),
        (("--continue", "target.gguf", "--random"), "error: --continue and --random: "),
        (("--continue", "target.gguf", "--base", "other.gguf"), "error: --continue and --base: "),
        (("--continue", "target.gguf", "--layers", "1"), "error: --continue and --layers: "),
        (("--steps", "3", "--minutes", "1"), "error: --steps and --minutes: "),
        (("--no-report", "--learning-curve"), "error: --no-report and --learning-curve: "),
        (("--hf-repo", "a/b"), "error: -m and -hf: "),
        (("--safetensors",), "error: --safetensors: "),
        (("--kind", "medusa"), "error: --kind medusa: "),
        (("--kind", "eagle3", "--layers", "2"), "error: --kind eagle3 and --layers: "),
        (("--kind", "eagle3", "--base", "other.gguf"), "error: --kind eagle3 and --base: "),
        (("--kind", "eagle3", "--continue", "a"), "error: --kind eagle3 and --continue: "),
        (("--kind", "eagle3", "--window", "9"), "error: --kind eagle3 and --window: "),
        (("--kind", "eagle3", "--safetensors"), "error: --kind eagle3 and --safetensors: "),
        (("--kind", "eagle3", "--on-policy", "0.5"), "error: --kind eagle3 and --on-policy: "),
        (("--kind", "eagle3", "-m", "hybrid.gguf"), "error: hybrid.gguf: no head can be made for it: "),
        (("-c", "16"), "error: -c 16: "),
        (("-o", "prompts.jsonl"), "error: prompts.jsonl: "),
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


def test_without_torch_one_line_says_what_to_install(
    distill: Call, monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = distill("-m", "nowhere.gguf", "-o", "d")
    assert outcome.status == 2 and outcome.out == "" and not (models / "d").exists()
    assert outcome.err == (
        "error: outrider distill: PyTorch is not installed. "
        "It comes with the extra distill: in Outrider's checkout, pip install '.[distill]'.\n"
    )
    helped = distill("--help")
    assert helped.status == 0 and "--learning-curve" in helped.out
    assert max(map(len, helped.out.splitlines())) <= 80


# What people read


def test_the_account_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, highlight=False, emoji=False, markup=False)
    print_distilled(console, made_up(), None, [Path("out/report.json")])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out.replace("second, …", "")
    assert "after training    57 %     67 %     35.8 1.28 (1.25-1.31) 1.20 (1.17-1.23)  88 %" in out
    assert "outrider run -md out/target-draft.gguf" in out
    assert "outrider check default out/target-draft.gguf" in out
    assert "more data should help" in " ".join(out.split())


def test_the_time_left_follows_the_last_minutes() -> None:
    now = 0.0
    left = TimeLeft(lambda: now)
    assert left.of("a", 0.0) is None and left.of("a", None) is None
    for part in (0.5, 0.5):  # half of it was there already
        now += 1.0
        left.of("a", part)
    for i in range(1, 301):
        now += 1.0
        found = left.of("a", 0.5 + i / 1000)
    assert found == pytest.approx(200, rel=0.01)
    assert left.of("b", 0.9) is None


def test_lines_come_now_and_then_and_name_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with (
        StepInterrupt() as interrupt,
        show_distilling(Console(stderr=True, width=200), interrupt, lambda: now) as progress,
    ):
        progress("measuring", None)
        for step in range(1, 41):
            now += 0.5
            progress("training", step / 40, f"step {step}")
    assert capsys.readouterr().err.splitlines() == [
        "measuring", "training: 2%, step 1", "training: 52%, 10 s left, step 21",
    ]  # fmt: skip


def test_ctrl_c_ends_other_stages_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        StepInterrupt() as interrupt,
        show_distilling(Console(stderr=True), interrupt) as progress,
    ):
        progress("training", 0.5)
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested  # it waits for the end of the step
        progress("training", 0.6)
    with pytest.raises(KeyboardInterrupt), StepInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")
    assert capsys.readouterr().err.startswith("training: 50%")
