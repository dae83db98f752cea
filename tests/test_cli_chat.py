"""`outrider run` and `outrider chat` in a terminal, and conversations through pipes."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cli_helpers import TEMPLATE, Call, Outcome, Terminal, environment, refused
from outrider.cli.screen import Screen
from outrider.cli.settings import TextSettings
from outrider.cli.stream import TokenPrinter
from outrider.core.data import Piece

SHORT = ("-t", "1", "--temp", "0", "-n", "8")
Open = Callable[..., Terminal]
ASKS = r"\x1b\[0m>"  # the question, as the line editor draws it


@pytest.fixture
def chat(outrider: Call, models: Path) -> Call:
    def run(*arguments: str, stdin: str = "", model: str = "chat", command: str = "chat") -> Outcome:
        file = str(models / f"{model}.gguf")
        return outrider(command, "-m", file, *SHORT, *arguments, stdin=stdin)

    return run


@pytest.fixture
def terminal(models: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(command: str, *arguments: str, model: str = "long", **env: str) -> Terminal:
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
    printer = TokenPrinter(cast(TextSettings, SimpleNamespace(show_source=False)), Screen())
    for _ in range(2):
        printer.print((Piece("shown ", "target"),))
        printer.end("shown held")
    assert capsys.readouterr().out == "shown held\n" * 2


def test_a_full_context_is_said_and_reset_helps(chat: Call) -> None:
    long = "the cat " * 100
    limits = ("-n", "-1", "-c", "256", "--policy", "plain")
    outcome = chat(*limits, stdin=f"hello\n{long}\n/reset\nhello\n")
    assert outcome.status == 0
    assert "; the context is full, -c gives a larger one]" in outcome.said
    assert "do not fit a context of 256" in outcome.err and "/reset starts" in outcome.err
    assert len(kept(outcome)) == 2, outcome.err


def test_a_template_that_refuses_a_message_does_not_end_the_conversation(chat: Call, tmp_path: Path) -> None:
    (tmp_path / "refuses").write_text("{{ raise_exception('no talk') }}" + TEMPLATE)
    outcome = chat("--chat-template-file", str(tmp_path / "refuses"), stdin="hello\n/exit\n")
    assert outcome.status == 0
    assert "no talk" in outcome.err and "Traceback" not in outcome.err


def test_what_a_conversation_cannot_use_is_refused(chat: Call) -> None:
    cases = [
        (chat(model="target", stdin="hello\n"), ["target", "no chat template", "outrider run"]),
        (chat("-f", "x"), ["-f: outrider chat has no such option."]),
        (chat(" "), ["prompt", "empty"]),
        (chat("hi", "-p", "ho"), ["PROMPT and -p"]),
    ]
    for outcome, parts in cases:
        said = refused(outcome)
        assert all(part in said for part in parts)
    for option in ("--json", "--compare", "--raw"):
        assert refused(chat(option)).startswith(f"{option}: outrider chat has no such option. ")


# In a terminal


def test_ctrl_c_ends_an_answer_and_then_the_conversation(terminal: Open, tmp_path: Path) -> None:
    program = terminal(
        "chat", "--ignore-eos", "-n", "8000", "--no-lookup", "--no-history", OUTRIDER_CACHE=str(tmp_path)
    )
    program.wait_for(ASKS)
    program.type("hello\r")
    program.wait_for("hello")
    program.wait_for(".{200}")
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
    assert not (tmp_path / "chat_history").exists()


def test_what_is_typed_is_edited_and_kept_for_its_owner(terminal: Open, chat: Call, tmp_path: Path) -> None:
    """A paste of any size, lines of one message, that message once more, and Ctrl-D."""
    pasted = (" the and" * 13 + "\n") * 40
    paste, lines, again = f"\x1b[200~{pasted}\x1b[201~\r", "three\x1b\rfour\r", "\x1b[A\x1b[A\r"
    program = terminal("chat", "-c", "8192", "-n", "2", OUTRIDER_CACHE=str(tmp_path))
    shown = []
    for typed in (paste, "/reset\r", lines, "/reset\r", again):
        program.wait_for(ASKS)
        program.type(typed)
        shown.append(program.wait_for("new conversation" if typed == "/reset\r" else "prompt tokens"))
    program.wait_for(ASKS)
    program.type("\x04")
    assert program.close() == 0 and "prompt tokens" not in program.shown
    wholes = [
        json.loads(chat("--json", "-c", "8192", "-p", text, model="long", command="run").out)["prompt_tokens"]
        for text in (pasted, "three\nfour")
    ]
    for place, whole in ((0, wholes[0]), (2, wholes[1]), (4, wholes[1])):
        assert f" of {whole} prompt tokens" in shown[place]
    history = tmp_path / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600 and "+four" in history.read_text()


@pytest.mark.parametrize("is_coloured", [True, False])
def test_sources_are_coloured_and_control_characters_are_not_shown(
    chat: Call, monkeypatch: pytest.MonkeyPatch, is_coloured: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    if not is_coloured:
        monkeypatch.setenv("NO_COLOR", "1")
    arguments = ("--show-source", "--policy", "fixed", "--ignore-eos", "-n", "200", "the and the and the and")
    outcome = chat(*arguments, command="run")
    assert outcome.status == 0 and "reading the prompt" in outcome.err
    assert ("tokens by:" in outcome.err) == ("\x1b[36m" in outcome.out) == is_coloured  # a token by lookup
    assert ("needs a terminal with colours" in outcome.err) == (not is_coloured)
    codes = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", outcome.out)
    assert not [c for c in codes if ord(c) < 32 and c not in "\r\n\t"]
