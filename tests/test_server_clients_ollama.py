"""Ollama's client for Python against the program `outrider serve` with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from outrider.core.data import Completion
from real_server import CONTEXT, KEY, MODEL, NAME, REASON, RealServer
from serving import user
from test_server_clients import LONG, NUM_TOKENS, PARAMETERS, QUESTION, expected, server

ollama: Any = pytest.importorskip("ollama", reason="`make test` installs it")

__all__ = ["expected", "server"]  # pytest finds the fixtures by their names

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

GREEDY = {"temperature": 0, "num_predict": NUM_TOKENS}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def client(server: RealServer) -> Iterator[Any]:
    with ollama.Client(host=server.address, headers=HEADERS) as client:
        yield client
    assert server.is_idle()


def test_a_chat_and_a_text_say_what_the_engine_says(client: Any, expected: Completion) -> None:
    chat = client.chat(NAME, user(QUESTION), options=GREEDY, keep_alive="5m")
    assert (chat.message.role, chat.message.content) == ("assistant", expected.text)
    assert (chat.model, chat.done, chat.done_reason) == (NAME, True, "length")
    assert (chat.prompt_eval_count, chat.eval_count) == (expected.prompt_tokens, NUM_TOKENS)
    assert chat.total_duration >= chat.eval_duration > 0
    text = client.generate(f"{NAME}:latest", QUESTION, options=GREEDY)
    assert text.response == expected.text


def test_answers_fit_a_schema(client: Any) -> None:
    asked = {"messages": user("Describe a trip as JSON."), "options": {"temperature": 0, "num_predict": 64}}
    whole = client.chat(NAME, format=PARAMETERS, **asked)
    jsonschema.validate(json.loads(whole.message.content), PARAMETERS)
    parts = client.chat(NAME, format=PARAMETERS, stream=True, **asked)
    assert "".join(part.message.content for part in parts) == whole.message.content
    options = {"temperature": 0, "num_predict": 200}
    assert isinstance(
        json.loads(client.generate(NAME, "A small one.", format="json", options=options).response), dict
    )


def test_tools_and_their_results_are_read(client: Any, expected: Completion) -> None:
    def forecast(city: str, days: int) -> str:
        """The weather of a city.

        Args:
            city: its name
            days: from today
        """
        raise AssertionError(f"the client ran it with {city} and {days}")

    asked = {"tools": [forecast], "options": GREEDY | {"num_predict": 12}}  # no near-tie by then
    whole = client.chat(NAME, user("What will the weather be in Rome?"), **asked)
    parts = list(client.chat(NAME, user("What will the weather be in Rome?"), stream=True, **asked))
    assert "".join(part.message.content for part in parts) == (whole.message.content or "")
    assert whole.prompt_eval_count > expected.prompt_tokens + 30  # the tool's schema is in it
    call = {"function": {"name": "forecast", "arguments": {"city": "Rome", "days": 1}}}
    turns = [
        *user("What will the weather be in Rome?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "forecast", "content": "Sunny, 31 degrees."},
    ]
    answer = client.chat(NAME, turns, **asked)
    assert answer.done and answer.prompt_eval_count > whole.prompt_eval_count


def test_models_are_listed_and_shown(client: Any) -> None:
    assert NAME in [model.model for model in client.list().models]
    assert [model.model for model in client.ps().models] == [NAME]
    shown = client.show(NAME)
    assert "completion" in shown.capabilities and shown.modelinfo["general.architecture"] == "llama"
    assert shown.details.format == "gguf" and shown.template


@pytest.fixture
def stranger(server: RealServer) -> Iterator[Any]:
    with ollama.Client(host=server.address, headers={"x-api-key": "wrong"}) as client:
        yield client


def test_errors_are_its_own_with_the_status(client: Any, stranger: Any) -> None:
    for status, found, ask in (
        (404, "gpt-9", lambda: client.chat("gpt-9", user("hi"))),
        (404, "gpt-9", lambda: list(client.chat("gpt-9", user("hi"), stream=True))),
        (404, "gpt-9", lambda: client.show("gpt-9")),
        (400, "options.temperature", lambda: client.chat(NAME, user("hi"), options={"temperature": -1})),
        (400, "maximum context length", lambda: client.chat(NAME, user("word " * CONTEXT))),
        (400, "images", lambda: client.generate(NAME, "hi", images=[b"\x89PNG"])),
        (404, "nothing at /api/embed", lambda: client.embed(NAME, "hi")),
        (401, "not accepted", stranger.list),
    ):
        with pytest.raises(ollama.ResponseError, match=found) as raised:
            ask()
        assert raised.value.status_code == status


def test_a_stream_that_is_left_and_a_client_that_waits_no_longer(server: RealServer, client: Any) -> None:
    def cancelled() -> float:
        return server.metric("outrider_requests_finished_total", finish_reason="cancelled")

    before, asked = cancelled(), {"options": {"temperature": 1.5, "num_predict": LONG, "seed": 5}}
    stream = client.chat(NAME, user("Tell a very long story."), stream=True, **asked)
    assert next(stream).message.content
    stream.close()
    assert server.is_idle() and cancelled() == before + 1
    hasty = ollama.Client(host=server.address, headers=HEADERS, timeout=0.3)
    with hasty, pytest.raises(Exception, match="timed out"):
        hasty.chat(NAME, user("Tell a very long story."), **asked)
    assert server.becomes(before + 2, "outrider_requests_finished_total", finish_reason="cancelled")
