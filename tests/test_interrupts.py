"""Ctrl-C at any line of the library: the next request is answered as by a fresh session."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any

import pytest

import outrider
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.backends.gguf.log import ERROR_LEVEL, LOG_CALLBACK
from outrider.cli.interrupt import LoadInterrupt
from outrider.core.params import SamplingParams
from outrider.drafters.lookup import SuffixDrafter
from outrider.engine.interrupts import deferred
from outrider.session import Session

PACKAGE = str(Path(outrider.__file__).parent)
VOCABULARY = FakeVocabulary("abcdefgh, ")


def session() -> Session:
    target = FakeModel(VOCABULARY, random_logits(VOCABULARY.size, seed=1))
    return Session(target, [SuffixDrafter()])


def text(of: Session) -> str:
    return of.generate("abc, abc, ", max_tokens=20, sampling=SamplingParams(temperature=0)).text


@contextmanager
def traced(on_line: Callable[[int], None]) -> Iterator[None]:
    """Call `on_line` for every line of the package that runs, with its number, from 1."""
    numbers = count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            on_line(next(numbers))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_at(line: int) -> AbstractContextManager[None]:
    """Press Ctrl-C when so many lines of the package have run."""
    return traced(lambda number: os.kill(os.getpid(), signal.SIGINT) if number == line else None)


def lines_of_a_request() -> int:
    asked, lines = session(), list[int]()
    with traced(lines.append):
        text(asked)
    return len(lines)


@pytest.mark.parametrize("times", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_request_after_an_interrupted_one_is_answered_as_the_first(times: int) -> None:
    rng = random.Random(0)
    expected, num_lines, asked = text(session()), lines_of_a_request(), session()
    num_interrupts = 0
    for _ in range(times):
        try:
            with interrupted_at(rng.randint(1, num_lines)):
                text(asked)
        except KeyboardInterrupt:
            num_interrupts += 1
        assert asked.engine.num_running == 0
        assert text(asked) == expected
    assert num_interrupts > 10


def test_a_second_one_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_it_itself_goes_on_doing_so() -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    try:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
        assert handled == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_a_callback_from_native_code_it_is_raised_a_moment_later() -> None:
    callback = LOG_CALLBACK(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), LoadInterrupt():
        callback(ERROR_LEVEL, b"by way of native code, which knows no exceptions", None)
        for _ in range(1000):
            sleep(0.01)
        pytest.fail("it was forgotten")
    with pytest.raises(KeyboardInterrupt), LoadInterrupt():
        callback(ERROR_LEVEL, b"where the block ends before", None)


def test_other_threads_leave_the_signal_alone() -> None:
    found: list[object] = []

    def run() -> None:
        with deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
