"""`outrider run` through pipes: its options, output, errors and exit statuses."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Call, Outcome, refused
from cli_helpers import result as as_json
from outrider.backends.gguf.model import Weights
from outrider.backends.rewinding import RewindSupport
from tiny_gguf import write_tiny

PLAIN = ("-t", "1", "--temp", "0", "-n", "8")
BASE_MODEL = "note: target has no chat template (a base model): continuing the text\n"


@pytest.fixture
def run(outrider: Call, models: Path) -> Call:
    """`outrider run` with the tiny target and short, greedy answers."""
    target = str(models / "target.gguf")
    return lambda *arguments, stdin="": outrider("run", "-m", target, *PLAIN, *arguments, stdin=stdin)


# The usual command line


def test_the_usual_llama_cpp_command_line_is_in_force(outrider: Call, models: Path) -> None:
    line = (
        "-c 256 -ngl 0 -ngld 0 -t 1 -n 6 -s 3 --temp 0.7 --top-k 9 --top-p 0.8 --min-p 0.1 "
        "--spec-draft-n-max 4 --draft-p-min 0.25"
    )
    pair = ("-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf"))
    settings = as_json(outrider("run", *pair, *line.split(), "--json", "-p", "hello"))["settings"]
    assert settings["target"]["name"] == "target" and settings["draft"]["name"] == "draft"
    assert settings["target"]["context_length"] == 256 and settings["draft"]["context_length"] == 256
    assert settings["target"]["gpu_layers"] == 0 and settings["draft"]["gpu_layers"] == 0
    assert settings["target"]["threads"] == 1
    sampling = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "seed": 3}
    assert settings["sampling"].items() >= sampling.items()
    assert settings["policy"].items() >= {"draft_max": 4, "p_min": 0.25}.items()
    assert settings["max_tokens"] == 6


# The prompt


def prompt_tokens(outcome: Outcome) -> int:
    return int(as_json(outcome)["prompt_tokens"])


def test_the_prompt_comes_from_any_source(run: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    expected = as_json(run("--json", "hello"))
    for arguments, stdin in (
        (["-p", "hello"], ""),
        (["-f", str(file)], ""),
        ([], "hello\n"),
        ([], "hello\r\n"),
        ([], "\ufeffhello"),
    ):
        result = as_json(run("--json", *arguments, stdin=stdin))
        assert (result["text"], result["prompt_tokens"]) == (expected["text"], expected["prompt_tokens"])


def test_line_breaks_and_escapes_of_a_prompt(run: Call) -> None:
    """Only the last line break of a file is dropped; escapes are read in -p alone."""
    assert prompt_tokens(run("--json", stdin="hello\n\n\n")) > prompt_tokens(run("--json", stdin="hello\n"))
    counts = [prompt_tokens(run("--json", *given)) for given in (("-p", r"a\n"), (r"a\n",))]
    assert counts == [2, 3] and prompt_tokens(run("--json", "--no-escape", "-p", r"a\n")) == 3


def test_the_system_message_is_part_of_the_conversation(outrider: Call, models: Path) -> None:
    arguments = ("run", "-m", str(models / "chat.gguf"), *PLAIN, "--json", "hello")
    raw, bare = prompt_tokens(outrider(*arguments, "--raw")), prompt_tokens(outrider(*arguments))
    assert raw < bare < prompt_tokens(outrider(*arguments, "-sys", "Be brief."))


# What goes where


def test_text_on_standard_output_and_the_rest_on_standard_error(run: Call) -> None:
    outcome = run("hello")
    text = as_json(run("--json", "hello"))["text"]
    assert outcome.status == 0
    assert outcome.out == text + "\n"
    assert outcome.err.startswith(BASE_MODEL)
    for name in ("models", "prompt", "answer", "target calls", "time"):
        assert f"\n{name} " in outcome.err
    assert "8 tokens in" in outcome.err and "token limit" in outcome.err
    quiet = run("-q", "hello")
    assert quiet.out == outcome.out and "target calls" not in quiet.err
    assert "llama_" not in outcome.err and "llama_" in run("-v", "hello").err


def test_the_readout_fits_80_columns(run: Call, models: Path) -> None:
    draft = ("-md", str(models / "draft.gguf"), "--policy", "fixed")
    outcome = run("--compare", "-n", "64", *draft, "the and the and the and")
    assert "draft calls" in outcome.err and "speed-up" in outcome.err and "by position" in outcome.err
    lines = outcome.err.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24


def test_an_automatic_choice_is_explained(run: Call, models: Path) -> None:
    arguments = ("-n", "32", "-md", str(models / "draft.gguf"), "the and the and")
    result = as_json(run("--json", *arguments))
    explanation = result["explanation"]
    assert result["settings"]["policy"]["kind"] == "auto"
    assert sum(made["steps"] for made in explanation["choices"].values()) == result["target_calls"]
    assert all(seconds > 0 for seconds in explanation["target_calls_s"].values())
    # Whether so short an answer shows it depends on the clock: it is a number or a reason.
    estimate = explanation["estimate"]
    assert (estimate is None) == isinstance(explanation["estimate_unknown"], str)
    assert estimate is None or 0 <= estimate["low"] <= estimate["speedup"] <= estimate["high"]
    shown = run("--explain", *arguments).err
    for part in ("lookup pays", "draft pays", "chosen", "speed-up"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_lengths_of_an_old_command_line_are_kept_and_explained(run: Call, models: Path) -> None:
    arguments = ("-n", "32", "-md", str(models / "draft.gguf"), "--draft", "3", "--draft-p-min", "0.5")
    shown = run("--explain", *arguments, "the and the and").err
    assert shown.count("note: --draft-p-min: lengths of drafts are fixed; without, Outrider chooses ") == 1
    for part in ("speed-up", "lookup pays", "draft pays", "chosen"):
        assert part in shown
    result = as_json(run("--json", *arguments, "the and the and"))
    assert result["settings"]["policy"]["kind"] == "fixed"
    assert len(result["acceptance_by_position"]) <= 3 and result["explanation"]["target_calls_s"]


def test_policies_are_chosen_by_name(run: Call) -> None:
    def policy(*arguments: str) -> dict[str, Any]:
        settings: dict[str, Any] = as_json(run("--json", "-n", "4", *arguments, "hello"))["settings"]
        return dict(settings["policy"])

    assert policy("--policy", "lookup") == {"kind": "lookup", "draft_max": 64}
    assert policy("--policy", "model", "--draft-max", "5")["draft_max"] == 5
    assert policy("--policy", "plain")["draft_max"] == 0
    assert policy("--draft-p-min", "0.3")["kind"] == "fixed"


def test_a_draft_that_cannot_be_asked_is_not_loaded_and_that_is_said(run: Call, models: Path) -> None:
    draft = str(models / "draft.gguf")

    def notes(*arguments: str) -> tuple[list[str], bool]:
        """The notes about drafts, and whether the draft model was loaded."""
        outcome = run("-n", "4", "-md", draft, *arguments, "--json", "hello")
        found = [line for line in outcome.said.split("note: ") if "loaded" in line]
        return found, "draft" in as_json(outcome)["settings"]

    assert notes() == ([], True)
    for arguments, why in (
        (["--policy", "plain"], "--policy plain"),
        (["--policy", "lookup"], "--policy lookup"),
        (["--spec-type", "ngram-mod"], "--policy lookup"),
        (["--draft-max", "0"], "--draft-max 0"),
        (["--policy", "fixed", "--draft-max", "0"], "--draft-max 0"),
    ):
        [note], is_loaded = notes(*arguments)
        assert "is not loaded" in note and why in note and not is_loaded


def test_settings_that_do_less_than_they_say_are_named(run: Call) -> None:
    seeded = ("--temp", "0.7", "-s", "5")
    for arguments, said in (
        (("-n", "-2", "-c", "64"), "-n -2"),
        ((*seeded, "--rule", "block"), "--seed 5: under the rule block the text depends on the drafts"),
    ):
        assert f"note: {said}" in run(*arguments, "hello").said
    for more in (
        ("--rule", "auto"),
        ("--rule", "block", "--policy", "plain"),
        ("--rule", "block", "--temp", "0"),
    ):
        assert "--seed" not in run(*seeded, *more, "hello").said


def test_notices_do_not_reach_json(outrider: Call, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    mamba = str(models / "mamba.gguf")
    outcome = outrider("run", "-m", mamba, *PLAIN, "--json", "hello")
    notices = as_json(outcome)["notices"]
    assert any("cannot forget tokens" in notice for notice in notices)
    assert "note: mamba cannot forget tokens" in outcome.err


def test_names_with_escape_sequences_and_markup_are_shown_as_text(outrider: Call, tmp_path: Path) -> None:
    evil = write_tiny(tmp_path / "evil \x1b[2J[bold]x.gguf")
    outcome = outrider("run", "-m", str(evil), *PLAIN, "hello")
    assert "\x1b" not in outcome.err
    assert "evil [2J[bold]x" in outcome.err


# Errors


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-n 0", "-n 0: it asks for nothing. Give 1 or more, or -1 for no limit."),
        ("-n -7", "--predict: -7 cannot be used: it has to be -2 or more."),
        ("-c -1", "--ctx-size: -1 cannot be used"),
        ("--temp nan", "--temp: nan cannot be used: it has to be a finite number"),
        ("-s -5", "seed: -5"),
        ("-b 0", "batch size: 0"),
        ("-ctk huge", "cache type k: 'huge' is not known"),
        ("-ngl many", "-ngl: 'many' is not a number"),
        ("--draft-max 1000000000", "--draft-max: 1000000000 cannot be used: it has to be 2048 or less"),
        ("--draft-sampling x", "--draft-sampling: x cannot be used"),
        (
            "--policy best",
            '--policy: best cannot be used: it has to be "auto", "lookup", "model", "fixed" or',
        ),
        (
            "--policy auto --draft-p-min 0.5",
            "--draft-p-min: --policy auto decides by itself. Leave it out, or",
        ),
        ("--policy plain --explain", "--explain: nothing is drafted"),
        ("-hf a/b", "-m and -hf: both name the model. Give one of them."),
        ("-r=", "-r"),
        ("-p hi ho", "PROMPT and -p: each gives a prompt. Give one of them."),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(
    outrider: Call, command: str, arguments: str, said: str
) -> None:
    words = ["-r", ""] if arguments == "-r=" else arguments.split()
    said = "--stop: it has to be text with at least 1 character" if arguments == "-r=" else said
    assert refused(outrider(command, "-m", "/nowhere.gguf", *words, stdin="hi")).startswith(said)


def test_an_error_is_one_message(run: Call, outrider: Call, models: Path) -> None:
    cases: list[tuple[Outcome, list[str]]] = [
        (run(), ["prompt", "empty"]),
        (run(" \n\t"), ["prompt", "empty"]),
        (run("-f", str(models), "-p", "ho"), ["-p and -f"]),
        (run("-f", str(models)), [str(models), "directory"]),
        (run("-sys", "Be brief.", "hi"), ["system message", "no chat template"]),
        (run("-c", "256", "the cat " * 200), ["prompt", "do not fit", "256", "-c"]),
        (run("-n", "-1", "ab" * 2000), ["prompt", "do not fit a context of 512"]),
        (run("-c", "2000000000", "hi"), ["target", "2000000000", "smaller context (-c"]),
        (outrider("run", "-hf", "nonsense", "hi"), ["hf:nonsense", "owner/repo"]),
    ]
    for outcome, parts in cases:
        message = refused(replace(outcome, err=outcome.err.removeprefix(BASE_MODEL)))
        assert all(part in message for part in parts), (parts, message)


def test_bytes_that_are_not_utf8_are_refused(run: Call, tmp_path: Path) -> None:
    file = tmp_path / "latin-1.txt"
    file.write_bytes(b"caf\xe9")
    argument = os.fsdecode(b"caf\xe9")
    cases = [
        (run("-f", str(file)), str(file)),
        (run(stdin=b"caf\xe9"), "standard input"),
        (run(argument), "the command line"),
        (run("hello", "-sys", argument), "the command line"),
    ]
    for outcome, source in cases:
        message = refused(outcome)
        assert message.startswith(f"{source}: ") and "UTF-8" in message
