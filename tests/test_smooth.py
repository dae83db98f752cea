"""`--smooth`: the thread that shows the text, and the program with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from time import sleep

import pytest

from cli_helpers import COMMAND, PATIENCE_S, TEMPLATE, Outcome, call, environment
from outrider.cli.stream import PacedPrinter
from outrider.core.data import Piece
from outrider.session.pacing import Pacer
from tiny_gguf import write_tiny

Run = Callable[..., Outcome]
Program = subprocess.Popen[bytes]
Start = Callable[[int], Program]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target.gguf")
    write_tiny(folder / "long.gguf", context_length=8192, layers=8)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], models: Path) -> Run:
    line = ("run", "-m", str(models / "target.gguf"), "-t", "1", "--temp", "0", "-n", "24", "--ignore-eos")
    return lambda *arguments: call(monkeypatch, capfdbinary, *line, *arguments, "hello hello hello")


def text_of(texts: list[tuple[Piece, ...]]) -> str:
    return "".join(piece.text for pieces in texts for piece in pieces)


# The thread


def test_text_is_shown_in_parts_while_the_caller_is_away() -> None:
    shown: list[tuple[Piece, ...]] = []
    with PacedPrinter(shown.append, Pacer()) as printer:
        printer.print([Piece("ab", "target")])
        sleep(0.05)
        printer.print([Piece("cdef", "draft")])
        while len(shown) < 3:  # the next step computes
            sleep(0.001)
        before_the_end = len(shown)
        printer.print([Piece("gh", "target")])
    assert before_the_end >= 3 and text_of(shown) == "abcdefgh"
    assert [emission.num_characters for emission in printer.emitted] == [
        sum(len(piece.text) for piece in pieces) for pieces in shown
    ]


def test_leaving_shows_the_rest_at_once() -> None:
    shown: list[tuple[Piece, ...]] = []
    pacer = Pacer()
    pacer.push(-2000, [Piece("x", "target")])
    pacer.push(-1000, [Piece("x", "target")])  # so a step takes a thousand seconds
    for error in (None, KeyboardInterrupt, ValueError):
        shown.clear()
        printer = PacedPrinter(shown.append, pacer)
        try:
            with printer:
                printer.print([Piece("a", "target")])
                printer.print([Piece("bcdefgh", "target")])
                if error:
                    raise error
        except (KeyboardInterrupt, ValueError):
            pass
        assert text_of(shown).endswith("abcdefgh")


def test_what_showing_raises_reaches_the_caller() -> None:
    def broken(_pieces: tuple[Piece, ...]) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError), PacedPrinter(broken, Pacer()) as printer:
        for _ in range(1000):  # the reader left: this ends long before
            printer.print([Piece("a", "target")])
            sleep(0.001)
        pytest.fail("nothing was raised")
    with pytest.raises(BrokenPipeError), PacedPrinter(broken, Pacer()) as printer:
        printer.print([Piece("a", "target")])  # raised while this was the last text


def test_a_slow_reader_holds_up_the_engine_after_two_steps() -> None:
    go_on = Event()
    shown: list[tuple[Piece, ...]] = []
    handed: list[str] = []

    def slow(pieces: tuple[Piece, ...]) -> None:
        go_on.wait(PATIENCE_S)
        shown.append(pieces)

    with PacedPrinter(slow, Pacer()) as printer:

        def engine() -> None:
            for text in "abcdefgh":
                printer.print([Piece(text, "target")])
                handed.append(text)

        thread = Thread(target=engine)
        thread.start()
        while len(handed) < 2:
            sleep(0.001)
        sleep(0.1)
        handed_meanwhile = list(handed)
        go_on.set()
        thread.join()
    assert handed_meanwhile == ["a", "b"]
    assert text_of(shown) == "abcdefgh"


def test_a_second_ctrl_c_does_not_wait_for_a_reader_that_is_stuck() -> None:
    go_on = Event()
    taken: list[tuple[Piece, ...]] = []

    def stuck(pieces: tuple[Piece, ...]) -> None:
        go_on.wait(PATIENCE_S)
        taken.append(pieces)

    with pytest.raises(KeyboardInterrupt), PacedPrinter(stuck, Pacer()) as printer:
        printer.print([Piece("a", "target")])
        printer.print([Piece("b", "target")])
        raise KeyboardInterrupt
    assert not taken
    go_on.set()


# The program


def test_the_text_is_the_same_and_the_readout_shows_both_gaps(run: Run) -> None:
    plain, smooth = run(), run("--smooth")
    assert smooth.status == 0 and smooth.out == plain.out
    assert "character gaps" not in plain.err
    line = re.sub(r"\s+", " ", smooth.err).partition("character gaps ")[2]
    assert re.match(r"paced p50 \S+ m?s, p95 \S+ m?s, max \S+ m?s; unpaced p50 ", line)
    assert "plain decoding" not in line


def test_a_comparison_tells_plain_decoding_s_gap_too(run: Run) -> None:
    err = re.sub(r"\s+", " ", run("--smooth", "--compare", "--repetitions", "1").err)
    assert re.search(r"unpaced p50 [^;]*; plain decoding: p95 about \S+ m?s", err)


def test_json_shows_no_text_as_it_comes(run: Run) -> None:
    outcome = run("--json", "--smooth")
    assert outcome.status == 2 and outcome.out == ""
    assert outcome.err == "error: --smooth: --json shows no text as it comes. Leave one of them out.\n"
    gaps = json.loads(run("--json").out)
    assert gaps["character_gap_s"].keys() == {"p50", "p95", "max"} and gaps["character_gap_s"]["max"] > 0
    assert gaps["paced_character_gap_s"] is None and gaps["plain_character_gap_s"] is None


def test_a_held_back_end_is_shown_once(run: Run) -> None:
    text = run("-q").out.removesuffix("\n")
    assert run("-q", "--smooth", "-r", text[-1] + "never").out == text + "\n"


def test_chat_is_paced_in_every_turn(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    write_tiny(tmp_path / "chat.gguf", chat_template=TEMPLATE)
    line = ("chat", "-m", str(tmp_path / "chat.gguf"), "-t", "1", "--temp", "0", "-n", "8")
    stdin = "hello\nagain\n/readout\n"
    plain = call(monkeypatch, capfdbinary, *line, stdin=stdin)
    smooth = call(monkeypatch, capfdbinary, *line, "--smooth", stdin=stdin)
    assert smooth.status == 0 and smooth.out == plain.out
    assert "character gaps" in smooth.err and "character gaps" not in plain.err


@pytest.fixture
def long_answer(models: Path) -> Start:
    def start(stdout: int) -> Program:
        line = [*COMMAND, "run", "--smooth", "-m", str(models / "long.gguf"), "-t", "1", "--ignore-eos"]
        return subprocess.Popen([*line, "hello"], stdout=stdout, stderr=subprocess.PIPE, env=environment())

    return start


def test_ctrl_c_shows_what_there_is_and_a_readout(
    long_answer: Start,
) -> None:
    with long_answer(subprocess.PIPE) as program:
        assert program.stdout and program.stdout.read(20)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 130 and out.endswith(b"\n")
    assert b"; interrupted" in err and b"character gaps" in err and b"Traceback" not in err


def test_a_reader_that_leaves_is_no_error(long_answer: Start) -> None:
    with long_answer(subprocess.PIPE) as program:
        assert program.stdout and program.stderr and len(program.stdout.read(20)) == 20
        program.stdout.close()
        assert b"Traceback" not in program.stderr.read()
        assert program.wait(PATIENCE_S) == 141


def test_a_second_ctrl_c_ends_a_program_whose_reader_is_stuck(
    long_answer: Start,
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 1
    while filled:  # to the last byte
        try:
            filled = os.write(writer, b"x" * 4096)
        except BlockingIOError:
            filled = 0
    os.set_blocking(writer, True)
    with long_answer(writer) as program:
        assert program.stderr and b"no chat template" in program.stderr.readline()
        for _ in range(2):
            sleep(0.3)  # the first text is stuck; the first Ctrl-C waits for it
            program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE_S)
    os.close(writer)
    os.close(reader)
    assert program.returncode in (130, -signal.SIGINT)  # the second: it was about to end
    assert b"interrupted" in err and b"Traceback" not in err and b"Fatal" not in err
