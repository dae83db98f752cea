"""`outrider run` and `outrider chat` in a terminal, and conversations through pipes."""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli_helpers import TEMPLATE, Call, Outcome, Terminal, environment, refused
from outrider.cli import stream
from outrider.cli.screen import Screen
from outrider.cli.settings import RunSettings
from outrider.cli.stream import TokenPrinter
from outrider.core.data import Completion, Draft, DraftWork, Piece, StepRecord
from tiny_gguf import write_tiny

SHORT = ("-t", "1", "--temp", "0", "-n", "8")
Open = Callable[..., Terminal]
ASKS = "\x1b[0m>"  # the question, as the line editor draws it


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
def chat(outrider: Call, models: Path) -> Call:
    def run(*arguments: str, stdin: str = "", model: str = "chat", command: str = "chat") -> Outcome:
        file = str(models / f"{model}.gguf")
        return outrider(command, "-m", file, *SHORT, *arguments, stdin=stdin)

    return run


@pytest.fixture
def terminal(models: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(command: str, *arguments: str, model: str = "chat", **env: str) -> Terminal:
        line = [command, "-m", str(models / f"{model}.gguf"), "-t", "1", "--temp", "0", *arguments]
        opened.append(Terminal(line, environment(PROMPT_TOOLKIT_NO_CPR="1", **env)))
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
    outcome = chat(stdin="/explain\n/help\nhello\n/explain\n\n   \n")
    assert outcome.status == 0
    assert outcome.err.count("no answer yet") == 1
    assert outcome.err.count("x one") == 1 and outcome.err.count("lookup pays") == 1
    assert outcome.err.count("Type a message") == 2
    assert len(kept(outcome)) == 1
    assert "nothing is drafted" in chat("--policy", "plain", stdin="hello\n/explain\n").err


@pytest.mark.parametrize("line", ["/foo", "/reset all"])
def test_a_command_that_is_not_known_says_how_to_send_it(chat: Call, line: str) -> None:
    outcome = chat(stdin=line + "\nhello\n")
    assert outcome.status == 0 and len(kept(outcome)) == 1
    assert f"There is no {line}." in outcome.said and "type a space first" in outcome.said


def test_only_answers_reach_standard_output(chat: Call) -> None:
    alone = chat("-q", stdin="hello\n/help\n").out
    assert alone == chat("-i", "-q", command="run", stdin="hello\n").out
    assert alone != chat("-q", stdin=" /help\n").out, "a message may begin with a slash"
    assert alone == chat("hello", "-q").out == chat("-p", "hello", stdin="/exit\n").out
    assert ">" not in alone


def test_a_held_back_end_is_shown_in_every_turn(chat: Call) -> None:
    text = chat("-n", "6", "-q", stdin="hello\n").out.removesuffix("\n")
    stop = text[-1] + "never"  # the last character may be its beginning, to the end
    once = chat("-n", "6", "-q", "-r", stop, stdin="hello\n").out
    assert once == text + "\n"
    assert chat("-n", "6", "-q", "-r", stop, stdin="hello\n/reset\nhello\n").out == once * 2


def test_what_ctrl_c_left_held_back_is_shown_in_every_turn(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TokenPrinter(cast(RunSettings, SimpleNamespace(show_source=False)), Screen())
    answer = Completion("shown held", (), "cancelled", 1, 0, 0, "rule", ())
    for _ in range(2):
        printer.print((Piece("shown ", "target"),))
        printer.end(answer.text)
    assert capsys.readouterr().out == "shown held\n" * 2


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
        (chat("-f", "x"), ["-f: outrider chat has no such option."]),
        (chat("-i", "-f", "x", command="run"), ["--file: not available in a conversation"]),
        (chat(" "), ["prompt", "empty"]),
        (chat("hi", "-p", "ho"), ["PROMPT and -p"]),
    ]
    for outcome, parts in cases:
        said = refused(outcome)
        assert all(part in said for part in parts)
    for option in ("--json", "--compare", "--raw"):
        assert refused(chat(option)).startswith(f"{option}: outrider chat has no such option. ")


# In a terminal


def test_ctrl_c_ends_an_answer_and_then_the_conversation(terminal: Open) -> None:
    program = terminal("chat", "--ignore-eos", "-n", "8000", "--no-lookup")
    program.wait_for(ASKS)
    program.type("hello\r")
    program.wait_for("hello")
    program.wait_for_more(200)
    program.type("\x03")
    program.wait_for("interrupted]")
    program.wait_for(ASKS)
    program.type("/explain\r")
    program.wait_for("lookup pays")
    program.wait_for(ASKS)
    program.type("never sent\x03\x03")
    program.wait_for("Ctrl-C once more, Ctrl-D or /exit: leave.")
    program.wait_for(ASKS)
    program.type("\x03")
    program.wait_for("interrupted")
    assert program.close() == 130


def test_ctrl_d_leaves(terminal: Open) -> None:
    program = terminal("chat")
    program.wait_for(ASKS)
    program.type("\x04")
    assert program.close() == 0


def test_a_paste_of_any_size_is_one_message(terminal: Open, chat: Call, tmp_path: Path) -> None:
    pasted = "a line of some words\n" * 200
    program = terminal("chat", "-c", "8192", "-n", "4", OUTRIDER_CACHE=str(tmp_path))
    program.wait_for(ASKS)
    program.type(f"\x1b[200~{pasted}\x1b[201~\r")
    shown = program.wait_for("prompt tokens")
    program.wait_for(ASKS)
    program.type("\x04")
    assert program.close() == 0 and "prompt tokens" not in program.shown
    whole = json.loads(chat("--json", "-c", "8192", "-p", pasted, command="run").out)["prompt_tokens"]
    assert f"0 of {whole} prompt tokens" in shown


def test_it_is_said_that_a_long_prompt_is_being_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_SHORT_S", -1.0)
    console = Screen(stderr=True, force_terminal=True)
    printer = TokenPrinter(cast(RunSettings, SimpleNamespace(show_source=False)), console)
    decode = StepRecord(0, 1, "decode", 1025, 1, Draft(), 0, (7,), DraftWork(), 0, 0, 0, 0, 0)
    reading = replace(decode, kind="prefill", num_evaluated=512, tokens=())
    with stream.Reading(printer) as status:
        status.note(reading)
        status.note(reading)
        time.sleep(0.2)  # it is drawn now and then
        status.note(decode)
        shown = capsys.readouterr().err
        status.note(decode)
    assert "reading the prompt: 1,024 tokens so far" in shown and shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")
    assert capsys.readouterr().err == ""


def test_several_lines_are_typed_as_one_message(terminal: Open, chat: Call, tmp_path: Path) -> None:
    program = terminal("chat", "-n", "2", OUTRIDER_CACHE=str(tmp_path))
    program.wait_for(ASKS)
    program.type("three\x1b\rfour\r")
    shown = program.wait_for("prompt tokens")
    program.wait_for(ASKS)
    program.type("\x04")
    assert program.close() == 0
    whole = json.loads(chat("--json", "-p", "three\nfour", command="run").out)["prompt_tokens"]
    assert f"0 of {whole} prompt tokens" in shown


@pytest.mark.parametrize("options", [(), ("--no-history",)])
def test_what_was_typed_is_kept_for_its_owner(
    terminal: Open, tmp_path: Path, options: tuple[str, ...]
) -> None:
    program = terminal("chat", "-n", "2", *options, OUTRIDER_CACHE=str(tmp_path))
    program.wait_for(ASKS)
    program.type("/explain\r")
    program.wait_for("no answer yet")
    program.wait_for(ASKS)
    program.type("\x1b[A\r")  # the last line once more
    program.wait_for("no answer yet")
    program.wait_for(ASKS)
    program.type("\x04")
    assert program.close() == 0
    history = tmp_path / "chat_history"
    assert history.exists() == (not options)
    if history.exists():
        assert history.stat().st_mode & 0o777 == 0o600 and "/explain" in history.read_text()


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
    program.wait_for("speed-up")
    assert program.close() == 0
    legend, text = shown.split("lookup", 1)
    assert "tokens by:" in legend
    assert "\x1b[36m" in text  # a token by lookup
    codes = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert not [c for c in codes if ord(c) < 32 and c not in "\r\n\t"]


def test_no_color_is_respected(terminal: Open) -> None:
    program = terminal(
        "run", "--show-source", "--policy", "fixed", "-n", "8", "the and the and", NO_COLOR="1"
    )
    shown = program.wait_for("speed-up")
    assert program.close() == 0
    assert "\x1b[36m" not in shown and "\x1b[32m" not in shown
