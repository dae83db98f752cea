"""Schemas in the Python API: what may be given, and what comes back. Ctrl-C at any line of the library."""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from pydantic import BaseModel, Field

import outrider
from outrider import Session
from outrider.backends.fake import FakeModel, FakeVocabulary
from outrider.backends.gguf.log import ERROR_LEVEL, LOG_CALLBACK
from outrider.cli.interrupt import LoadInterrupt
from outrider.core.data import Completion, Grammar
from outrider.core.errors import GrammarError
from outrider.engine.loop import deferred
from outrider.session.generation import parser_of, read_schema
from test_session import GREEDY, fake_session
from vocabularies import TableVocabulary, Token, bytes_and

# Schemas: what may be given, and what comes back


class Town(BaseModel):
    """What is asked for."""

    name: str
    kind: str
    inhabitants: int


ULM = Town(name="Ulm", kind="city", inhabitants=5)
WRITTEN = '{"name": "Ulm", "kind": "city", "inhabitants": 5}'


def answer(text: str = WRITTEN, **settings: Any) -> Completion:
    """What a model that wants to say a text answers to a prompt of one token."""
    vocabulary = TableVocabulary([*bytes_and(), Token(b"<end>", control=True, end=True)])
    script = [*text.encode(), 256]

    def next_logits(tokens: Sequence[int]) -> Any:
        row = np.zeros(257, dtype=np.float32)
        row[script[min(len(tokens), len(script)) - 1]] = 9.0
        return row

    options: dict[str, Any] = {"context_length": 256, "max_batch_tokens": 256, "max_rows": 256}
    with Session(FakeModel(cast(FakeVocabulary, vocabulary), next_logits, **options)) as session:
        return session.generate("?", **{"schema": Town, "sampling": GREEDY, "max_tokens": 100, **settings})


def test_a_pydantic_model_gives_its_schema_and_parses() -> None:
    text, parse = read_schema(Town)
    assert json.loads(text)["required"] == ["name", "kind", "inhabitants"]
    assert parse(WRITTEN) == ULM


def test_the_objects_of_a_model_have_its_fields_only() -> None:
    class Open(BaseModel, extra="allow"):
        town: Town
        example: dict[str, int] = Field(default={"type": "object", "properties": {}})  # type: ignore[dict-item]

    text, _ = read_schema(Open)
    schema = json.loads(text)
    assert schema["additionalProperties"] is True
    assert schema["$defs"]["Town"]["additionalProperties"] is False
    assert schema["properties"]["example"]["default"] == {"type": "object", "properties": {}}
    plain = {"type": "object", "properties": {}}
    assert json.loads(read_schema(plain)[0]) == plain


@pytest.mark.parametrize("schema", [{"type": "integer"}, '{"type": "integer"}'])
def test_plain_data_and_text_are_schemas(schema: dict[str, str] | str) -> None:
    text, parse = read_schema(schema)
    assert json.loads(text) == {"type": "integer"} and parse("3") == 3


@pytest.mark.parametrize("schema", [7, None, [1], str, {"a": object()}, {"a": {1, 2}}])
def test_anything_else_is_refused(schema: object) -> None:
    with pytest.raises(GrammarError, match="schema"):
        read_schema(schema)  # type: ignore[arg-type]


def test_an_answer_comes_back_as_an_object() -> None:
    completion = answer()
    assert completion.is_complete and completion.finish_reason == "stop"
    assert completion.parsed == ULM and completion.text == WRITTEN
    assert any("grammar" in record.draft.sources for record in completion.records)


def test_forcing_changes_no_token() -> None:
    off, exact = (answer(grammar=Grammar("json_schema", fast_forward=mode)) for mode in ("off", "exact"))
    assert off.text == exact.text and off.parsed == exact.parsed
    calls = [sum(record.kind == "decode" for record in run.records) for run in (off, exact)]
    assert calls[1] < calls[0] / 1.5


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(GrammarError):
        answer(schema={"type": "object", "properties": 3})


@pytest.mark.parametrize("marks", [(), ("</think>",)], ids=["spelled", "a control token"])
def test_what_is_behind_a_trigger_is_parsed(marks: tuple[str, ...]) -> None:
    vocabulary = TableVocabulary(
        [
            *bytes_and("a}", '>{"'),
            *(Token(mark.encode(), control=True) for mark in marks),
            Token(b"<end>", control=True, end=True),
        ]
    )
    grammar, parse = Grammar("json_schema", after="</think>"), read_schema("{}")[1]
    trigger = [vocabulary.size - 2] if marks else list(b"</think>")
    text = [*b'{"a": "\xc3\xa9"} ', *trigger, *b'\n{"a": "</think>"}', vocabulary.size - 1]
    parsed = parser_of(grammar, vocabulary, parse)(answered(text))
    assert parsed == {"a": "</think>"}
    assert parser_of(grammar, vocabulary, parse)(answered([65, 66])) is None


def test_an_answer_that_was_thought_over_is_parsed() -> None:
    completion = answer(f"so {WRITTEN}", grammar=Grammar("json_schema", after=" "))
    assert completion.is_complete and completion.parsed == ULM
    assert not completion.text.startswith("{")


@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [({"max_tokens": 5}, WRITTEN[:5], "length"), ({"stop": ["}"]}, WRITTEN[:-1], "stop")],
)
def test_an_answer_that_was_cut_is_not_parsed(settings: dict[str, Any], text: str, reason: str) -> None:
    completion = answer(**settings)
    assert (completion.finish_reason, completion.text) == (reason, text)
    assert not completion.is_complete and completion.parsed is None


def answered(tokens: list[int]) -> Completion:
    return Completion("not read", tuple(tokens), "stop", 1, 0, 0, "token", ())


# Ctrl-C: the next request is answered as by a fresh session

PACKAGE = str(Path(outrider.__file__).parent)


def text(of: Session) -> str:
    return of.generate("abc, abc, ", max_tokens=20, sampling=GREEDY).text


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
    asked, lines = fake_session(), list[int]()
    with traced(lines.append):
        text(asked)
    return len(lines)


@pytest.mark.parametrize("times", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_request_after_an_interrupted_one_is_answered_as_the_first(times: int) -> None:
    rng = random.Random(0)
    expected, num_lines, asked = text(fake_session()), lines_of_a_request(), fake_session()
    num_interrupts = 0
    for _ in range(times):
        try:
            with interrupted_at(rng.randint(1, num_lines)):
                text(asked)
        except KeyboardInterrupt:
            num_interrupts += 1
        assert asked.engine.num_running == 0
        assert text(asked) == expected
    assert num_interrupts > 5


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
