"""`outrider run` and `outrider chat` in a terminal, and conversations through pipes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from cli_helpers import TEMPLATE, Outcome, Terminal, call, environment
from outrider.backends.gguf import installed
from outrider.cli.settings import RunSettings
from outrider.cli.stream import TokenPrinter
from outrider.core.data import Completion, Piece
from tiny_gguf import write_tiny

COMPILERS = shutil.which("cc") is not None and shutil.which("c++") is not None
SHORT = ("-t", "1", "--temp", "0", "-n", "8")
Call = Callable[..., Outcome]
Open = Callable[..., Terminal]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "chat.gguf", chat_template=TEMPLATE, context_length=8192)
    write_tiny(folder / "short.gguf", chat_template=TEMPLATE, context_length=256)
    write_tiny(folder / "base.gguf")
    refuses = "{{ raise_exception('no talk') }}" + TEMPLATE
    write_tiny(folder / "refuses.gguf", chat_template=refuses)
    return folder


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], models: Path) -> Call:
    def run(*arguments: str, stdin: str = "", model: str = "chat", command: str = "chat") -> Outcome:
        file = str(models / f"{model}.gguf")
        return call(monkeypatch, capfdbinary, command, "-m", file, *SHORT, *arguments, stdin=stdin)

    return run


@pytest.fixture
def terminal(models: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(command: str, *arguments: str, model: str = "chat", **env: str) -> Terminal:
        line = [command, "-m", str(models / f"{model}.gguf"), "-t", "1", "--temp", "0", *arguments]
        opened.append(Terminal(line, environment(**env)))
        return opened[-1]

    yield start
    for program in opened:
        program.kill()


def kept(outcome: Outcome) -> list[tuple[int, int]]:
    """For each answer, the prompt tokens that were kept and how many there were."""
    found = re.findall(r"(\d+) of (\d+) prompt tokens kept", outcome.said)
    return [(int(kept), int(total)) for kept, total in found]


# Through pipes


def test_a_conversation_keeps_its_kv(chat: Call) -> None:
    outcome = chat(stdin="hello\nand again\nonce more\n")
    assert outcome.status == 0
    turns = kept(outcome)
    assert len(turns) == 3
    assert turns[0][0] == 0
    for (_, before), (reused, total) in pairwise(turns):
        assert before <= reused < total


def test_reset_forgets_the_turns_and_keeps_the_system_message(chat: Call) -> None:
    outcome = chat("-sys", "You are brief.", stdin="hello\n/reset\nhello\n/exit\nnever sent\n")
    assert outcome.status == 0
    (_, first), (reused, second) = kept(outcome)
    assert first == second and reused == first - 1
    assert "a new conversation" in outcome.err
    answers = outcome.out.splitlines()
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :]


def test_commands_of_a_conversation(chat: Call) -> None:
    outcome = chat(stdin="/readout\n/help\nhello\n/readout\n\n   \n")
    assert outcome.status == 0
    assert "nothing was answered yet" in outcome.err
    assert outcome.err.count("Type a message") == 2
    assert "target chat" in outcome.err and "target calls" in outcome.err
    assert any(f"library {file}" in outcome.said for file in installed())
    assert len(kept(outcome)) == 1


def test_only_answers_reach_standard_output(chat: Call) -> None:
    alone = chat("-q", stdin="hello\n/help\n").out
    assert alone == chat("hello", "-q").out == chat("-p", "hello", stdin="/exit\n").out
    assert ">" not in alone


def test_run_interactive_is_chat(chat: Call) -> None:
    assert chat("-i", command="run", stdin="hello\n").out == chat(stdin="hello\n").out


def test_a_held_back_end_is_shown_in_every_turn(chat: Call) -> None:
    text = chat("-n", "6", "-q", stdin="hello\n").out.removesuffix("\n")
    stop = text[-1] + "never"  # the last character may be its beginning, to the end
    once = chat("-n", "6", "-q", "-r", stop, stdin="hello\n").out
    assert once == text + "\n"
    assert chat("-n", "6", "-q", "-r", stop, stdin="hello\n/reset\nhello\n").out == once * 2


def test_what_ctrl_c_left_held_back_is_shown_in_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TokenPrinter(cast(RunSettings, SimpleNamespace(show_source=False, smooth=False)), Console())
    answer = Completion("shown held", (), "cancelled", 1, 0, 0, "rule", False, ())
    for _ in range(2):
        printer.print((Piece("shown ", "target"),))
        printer.end(answer.text)
    assert capsys.readouterr().out == "shown held\n" * 2


def test_the_trace_of_a_conversation_has_all_turns(chat: Call, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    chat("--trace", str(trace), stdin="hello\nagain\n")
    requests = {json.loads(line)["request"] for line in trace.read_text().splitlines()}
    assert len(requests) == 2


def test_a_full_context_is_said_and_reset_helps(chat: Call) -> None:
    long = "the cat " * 100
    outcome = chat("-n", "-1", "--policy", "plain", model="short", stdin=f"hello\n{long}\n/reset\nhello\n")
    assert outcome.status == 0
    assert "context of 256 tokens is full" in outcome.err
    assert "do not fit a context of 256" in outcome.err and "/reset starts" in outcome.err
    assert len(kept(outcome)) == 2, outcome.err


def test_a_template_that_refuses_a_message_does_not_end_the_conversation(chat: Call) -> None:
    outcome = chat(model="refuses", stdin="hello\n/exit\n")
    assert outcome.status == 0
    assert "no talk" in outcome.err and "Traceback" not in outcome.err


def test_what_a_conversation_cannot_use_is_refused(chat: Call) -> None:
    cases = [
        (chat(model="base", stdin="hello\n"), ["base", "no chat template", "outrider run"]),
        (chat("--json"), ["--json"]),
        (chat("--compare"), ["--compare"]),
        (chat("--raw"), ["--raw"]),
        (chat("-f", "x"), ["-f", "-p for a first message"]),
        (chat(" "), ["prompt", "empty"]),
        (chat("hi", "-p", "ho"), ["PROMPT and -p"]),
    ]
    for outcome, parts in cases:
        assert outcome.status == 2 and outcome.out == ""
        assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
        for part in parts:
            assert part in outcome.err


# In a terminal


def test_ctrl_c_ends_an_answer_and_then_the_conversation(terminal: Open) -> None:
    program = terminal("chat", "--ignore-eos", "-n", "8000", "--no-lookup")
    program.wait_for("> ")
    program.type("hello\n")
    program.wait_for("hello\r\n")
    program.wait_for_more(50)
    program.type("\x03")
    program.wait_for("interrupted]")
    program.wait_for("> ")
    program.type("/readout\n")
    program.wait_for("target calls")
    program.wait_for("> ")
    sleep(0.5)  # a signal between the question and the wait for a line is only seen with the next key
    program.type("\x03")
    program.wait_for("interrupted")
    assert program.close() == 130


def test_ctrl_d_leaves(terminal: Open) -> None:
    program = terminal("chat")
    program.wait_for("> ")
    program.type("\x04")
    assert program.close() == 0


def test_a_terminal_is_asked_for_the_prompt(terminal: Open) -> None:
    program = terminal("run", "-n", "4")
    program.wait_for("prompt> ")
    program.type("hello\n")
    program.wait_for("token limit")
    assert program.close() == 0


def test_sources_are_coloured_and_control_characters_are_not_shown(terminal: Open) -> None:
    program = terminal(
        "run", "--show-source", "--policy", "fixed", "--ignore-eos", "-n", "200", "the and the and the and"
    )
    shown = program.wait_for("models")
    program.wait_for("max")
    assert program.close() == 0
    legend, text = shown.split("lookup", 1)
    assert "tokens by:" in legend
    assert "\x1b[36m" in text  # a token by lookup
    codes = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert not [c for c in codes if ord(c) < 32 and c not in "\r\n\t"]


def test_a_person_is_told_once_that_a_library_for_this_cpu_is_to_be_had(
    terminal: Open, tmp_path: Path
) -> None:
    shown = []
    for _ in range(2):
        program = terminal("run", "--policy", "fixed", "-n", "4", "the and", OUTRIDER_CACHE=str(tmp_path))
        assert program.close() == 0
        shown.append(program.shown)
    assert ["outrider setup --native" in text for text in shown] == [COMPILERS, False]


def test_no_color_is_respected(terminal: Open) -> None:
    program = terminal(
        "run", "--show-source", "--policy", "fixed", "-n", "8", "the and the and", NO_COLOR="1"
    )
    shown = program.wait_for("max")
    assert program.close() == 0
    assert "\x1b[36m" not in shown and "\x1b[32m" not in shown
