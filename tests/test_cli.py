"""`outrider run` through pipes: its options, output, errors and exit statuses."""

import io
import os
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import TEMPLATE, Call, Outcome, refused, spawn
from cli_helpers import result as as_json
from engines import PROMPT, VOCABULARY, language_model, model_drafter
from outrider import __version__ as outrider_version
from outrider.backends.fake import random_logits
from outrider.backends.gguf.model import Weights
from outrider.backends.rewinding import RewindSupport
from outrider.cli.report import print_readout
from outrider.cli.screen import Screen
from outrider.core.data import Request
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.session.explain import explain
from outrider.session.readout import read_out
from recordings import FLAT
from simulated import Simulated
from tiny_gguf import write_tiny

PLAIN = ("-t", "1", "--temp", "0", "-n", "8")
EVIL = "evil \x1b[2J[bold]x.gguf"
BASE_MODEL = "note: target has no chat template (a base model): continuing the text\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf")
    write_tiny(folder / "draft.gguf", noise=0.3)
    write_tiny(folder / "chat.gguf", chat_template=TEMPLATE)
    write_tiny(folder / EVIL)
    write_tiny(folder / "mamba.gguf", arch="mamba")
    (folder / "truncated.gguf").write_bytes((folder / "target.gguf").read_bytes()[:200_000])
    (folder / "text.gguf").write_text("no model at all")
    return folder


@pytest.fixture
def run(outrider: Call, models: Path) -> Call:
    """`outrider run` with the tiny target and short, greedy answers."""
    target = str(models / "target.gguf")
    return lambda *arguments, stdin="": outrider("run", "-m", target, *PLAIN, *arguments, stdin=stdin)


# The usual command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "5", "--temp", "0.5", "-s", "7"],
        ["-n5", "--temp=0.5", "-s7"],
        ["--n-predict", "5", "--temperature", "0.5", "--seed", "7"],
        ["--predict=5", "--temp=0.5", "--seed=7"],
    ],
)
def test_the_forms_of_an_option_mean_the_same(outrider: Call, models: Path, arguments: list[str]) -> None:
    target = str(models / "target.gguf")
    result = as_json(outrider("run", "-m", target, "-t", "1", "--json", *arguments, "-p", "hello"))
    assert result["settings"]["max_tokens"] == 5
    assert result["settings"]["sampling"]["temperature"] == 0.5
    assert result["settings"]["sampling"]["seed"] == 7


def test_the_usual_llama_cpp_command_line_is_in_force(outrider: Call, models: Path) -> None:
    line = (
        "-c 256 -ngl 0 -ngld 0 -t 1 -n 6 -s 3 --temp 0.7 --top-k 9 --top-p 0.8 --min-p 0.1 "
        "--spec-draft-n-max 4 --draft-min 1 --draft-p-min 0.25"
    )
    pair = ("-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf"))
    settings = as_json(outrider("run", *pair, *line.split(), "--json", "-p", "hello"))["settings"]
    assert settings["target"]["name"] == "target" and settings["draft"]["name"] == "draft"
    assert settings["target"]["context_length"] == 256 and settings["draft"]["context_length"] == 256
    assert settings["target"]["gpu_layers"] == 0 and settings["draft"]["gpu_layers"] == 0
    assert settings["target"]["threads"] == 1
    sampling = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "seed": 3}
    assert settings["sampling"].items() >= sampling.items()
    assert settings["policy"].items() >= {"draft_max": 4, "draft_min": 1, "p_min": 0.25}.items()
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
        (["-f", "-"], "hello"),
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


def test_the_readout_fits_80_columns(run: Call, models: Path) -> None:
    draft = ("-md", str(models / "draft.gguf"), "--policy", "fixed")
    outcome = run("--compare", "-n", "64", *draft, "the and the and the and")
    assert "draft calls" in outcome.err and "speed-up" in outcome.err and "by position" in outcome.err
    lines = outcome.err.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24


def test_what_is_shown_is_asked_for(run: Call) -> None:
    quiet = run("-q", "hello")
    assert quiet.out and "target calls" not in quiet.err
    assert "llama_" not in run("hello").err and "llama_" in run("-v", "hello").err


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
    arguments = ("-n", "32", "-md", str(models / "draft.gguf"), "--draft", "3", "--draft-min", "1")
    shown = run("--explain", *arguments, "the and the and").err
    assert shown.count("note: --draft-min fixes the lengths of drafts: leave it out, and Outrider ch") == 1
    for part in ("speed-up", "lookup pays", "draft pays", "chosen"):
        assert part in shown
    assert "note: --draft-min and --draft-p-min fix" in run(*arguments, "--draft-p-min", "0.5", "the").err
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
    for wrong, why in (
        (("--policy", "best"), '"auto", "lookup", "model", "fixed" or "plain"'),
        (("--policy", "auto", "--draft-min", "2"), "--policy fixed"),
        (("--policy", "plain", "--explain"), "nothing is drafted"),
    ):
        outcome = run(*wrong, "hello")
        assert outcome.status == 2 and why in outcome.err


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


def test_a_seed_repeats_with_drafts(run: Call) -> None:
    def texts(*arguments: str) -> set[str]:
        given = ("--json", "--temp", "1", "-s", "3", "-n", "24", *arguments, "in the end in the end")
        return {as_json(run(*given))["text"] for _ in range(2)}

    [text] = texts()
    assert texts("--policy", "plain") == texts("--policy", "fixed", "--draft-p-min", "0") == {text}


def test_notices_do_not_reach_json(outrider: Call, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_try_checkpoints", lambda _self: RewindSupport("none"))
    mamba = str(models / "mamba.gguf")
    outcome = outrider("run", "-m", mamba, *PLAIN, "--json", "hello")
    notices = as_json(outcome)["notices"]
    assert any("cannot forget tokens" in notice for notice in notices)
    assert "note: mamba cannot forget tokens" in outcome.err


def test_a_stop_string_ends_the_text(run: Call) -> None:
    text = as_json(run("--json", "-n", "16", "hello"))["text"]
    stop = text[4:6]
    result = as_json(run("--json", "-n", "16", "-r", stop, "hello"))
    assert result["text"] == text[: text.index(stop)] and result["finish_reason"] == "stop"


def test_names_with_escape_sequences_and_markup_are_shown_as_text(outrider: Call, models: Path) -> None:
    outcome = outrider("run", "-m", str(models / EVIL), *PLAIN, "hello")
    assert "\x1b" not in outcome.err
    assert "evil [2J[bold]x" in outcome.err


# Errors


def test_an_error_is_one_message(run: Call, outrider: Call, models: Path) -> None:
    no_file, text, cut = (str(models / name) for name in ("none.gguf", "text.gguf", "truncated.gguf"))
    cases: list[tuple[Outcome, list[str]]] = [
        (outrider("run", "-m", no_file, "hi"), [no_file, "no such file"]),
        (outrider("run", "-m", text, "hi"), [text, "not a GGUF"]),
        (outrider("run", "-m", cut, "hi"), [cut, "missing", "download it again"]),
        (outrider("run", "-m", str(models), "hi"), [str(models), "directory"]),
        (run("-n", "0", "hi"), ["-n 0", "asks for nothing", "-1 for no limit"]),
        (run("-n", "-7", "hi"), ["-n -7", "not a number of tokens"]),
        (run("--temp", "nan", "hi"), ["--temp: nan", "finite"]),
        (run("-s", "-5", "hi"), ["seed", "-5"]),
        (run("-c", "-1", "hi"), ["--ctx-size: -1 cannot be used"]),
        (run("-c", "1", "hi"), ["context size", "2 or more"]),
        (run("-b", "0", "hi"), ["batch size", "0"]),
        (run("-ctk", "huge", "hi"), ["cache type k", "'huge'", "q8_0"]),
        (run("-ngl", "many", "hi"), ["-ngl", "'many'"]),
        (run("--draft-max", "1000000000", "hi"), ["--draft-max", "1000000000", "2048 or less"]),
        (run("--draft-sampling", "x", "hi"), ["--draft-sampling", "greedy"]),
        (run("--repetitions", "0", "hi"), ["--repetitions", "0"]),
        (run("-hf", "a/b", "hi"), ["-m and -hf", "one of them"]),
        (run("-r", "", "hi"), ["-r", "empty"]),
        (run(), ["prompt", "empty"]),
        (run(" \n\t"), ["prompt", "empty"]),
        (run("hi", "-p", "ho"), ["PROMPT and -p", "one of them"]),
        (run("-f", str(models), "-p", "ho"), ["-p and -f"]),
        (run("-f", str(models)), [str(models), "directory"]),
        (run("-f", no_file), [no_file, "no such file"]),
        (run("-sys", "Be brief.", "hi"), ["system message", "no chat template"]),
        (run("-c", "256", "the cat " * 200), ["prompt", "do not fit", "256", "-c"]),
        (run("-n", "-1", "ab" * 2000), ["prompt", "do not fit a context of 512"]),
        (outrider("run", "-hf", "nonsense", "hi"), ["hf:nonsense", "owner/repo"]),
        (run("-c", "2000000000", "hi"), ["target", "2000000000", "smaller context (-c"]),
    ]
    for outcome, parts in cases:
        message = refused(replace(outcome, err=outcome.err.removeprefix(BASE_MODEL)))
        assert all(part in message for part in parts), (parts, message)


def test_bad_numbers_are_found_before_anything_is_loaded(outrider: Call) -> None:
    for arguments in ("-n 0", "-c -1", "--temp -1", "-t x", "-b 0", "-r="):
        for command in ("run", "chat"):
            line = [word.removesuffix("=") for word in arguments.split()] + [""] * arguments.endswith("=")
            outcome = outrider(command, "-m", "/nowhere.gguf", *line, stdin="hi")
            assert outcome.status == 2 and "nowhere" not in outcome.err, arguments


def test_an_unknown_option_is_answered_with_similar_ones(run: Call) -> None:
    outcome = run("--drft-max", "3", "hi")
    assert outcome.status == 2 and outcome.out == ""
    assert "--drft-max" in outcome.err and "--draft-max" in outcome.err and "outrider run" in outcome.err


def test_tokenizers_that_do_not_line_up_are_refused(run: Call, tmp_path: Path) -> None:
    merges = [f"{a} {b}" for a in "qwxyz" for b in "QWXYZ0123456789"]
    other = write_tiny(
        tmp_path / "other.gguf", merges=[*merges, *(f"{m.replace(' ', '')} q" for m in merges)]
    )
    outcome = run("-md", str(other), "hi")
    assert outcome.status == 2, outcome.err
    assert outcome.out == "" and "tokens" in outcome.err


def test_bytes_that_are_not_utf8_are_refused(run: Call, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin-1.txt"
    file.write_bytes(b"caf\xe9")
    argument = os.fsdecode(b"caf\xe9")
    cases = [
        (run("-f", str(file)), str(file)),
        (run(stdin=b"caf\xe9"), "standard input"),
        (run(argument), "prompt"),
        (run("-p", argument), "prompt"),
        (run("hello", "-sys", argument), "system message"),
        (spawn("run", "-m", str(models / "target.gguf"), argument), "prompt"),
    ]
    for outcome, source in cases:
        message = refused(outcome)
        assert message.startswith(f"{source}: ") and "UTF-8" in message


# Help


def test_help_of_the_program_and_of_chat(outrider: Call) -> None:
    program = outrider("--help")
    assert program.status == 0 and "run " in program.out and "chat " in program.out
    chat = outrider("chat", "--help")
    assert chat.status == 0 and "outrider chat" in chat.out
    assert "--compare" not in chat.out and "--json " not in chat.out and "-md" in chat.out
    assert outrider().status == 2  # click's convention for a command that is missing


def test_version(outrider: Call) -> None:
    outcome = outrider("--version")
    assert outcome.status == 0
    assert re.fullmatch(
        r"outrider 0\.\S+ \(((ik-llama-cpp-python|xllamacpp|llama-cpp-python) [0-9.]+(, )?)+\)\n", outcome.out
    )


def test_the_changelog_begins_with_this_version() -> None:
    changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[0] == outrider_version


def test_version_without_a_library_that_runs_models(outrider: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    outcome = outrider("--version")
    assert outcome.status == 0 and outcome.out.endswith("(no library to run models)\n")


@pytest.mark.parametrize(("step_s", "row"), [(0.02, r"0: .* [0-9]+% of its tokens"), (0.3, r"0\s*$")])
def test_why_a_draft_model_was_not_asked_is_said(step_s: float, row: str) -> None:
    """Reading the prompt takes it too long here; the dearer one could not pay if it were always right."""
    policy = Simulated(FLAT, step_s, prefill_s=100.0)
    engine = Engine(language_model(), [model_drafter(random_logits(VOCABULARY.size, seed=1))], policy)
    request = Request(PROMPT, SamplingParams(temperature=0), max_tokens=12, ignore_end=True)
    completion = engine.generate(request)
    shown = io.StringIO()
    console = Screen(file=shown, width=200)
    print_readout(
        console, read_out(completion), "target", "draft", explain(completion.records, policy), estimate=False
    )
    assert re.search(rf"^draft calls +{row}", shown.getvalue(), re.MULTILINE)
    assert "estimated" not in shown.getvalue()
