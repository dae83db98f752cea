"""Anthropic's client for Python against the program `outrider serve` with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic

from outrider.core.data import Completion
from real_server import CONTEXT, KEY, MODEL, NAME, REASON, RealServer
from test_server_clients import NUM_TOKENS, PARAMETERS, QUESTION, expected, server

__all__ = ["expected", "server"]  # pytest finds the fixtures by their names

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]

TOOL: Any = {"name": "forecast", "description": "The weather of a city.", "input_schema": PARAMETERS}


@pytest.fixture
def client(server: RealServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.address, api_key=KEY, max_retries=0) as client:
        yield client
    assert server.is_idle()


def asked(text: str = QUESTION, **more: Any) -> dict[str, Any]:
    """The arguments of a request for a short, greedy answer."""
    turns = [{"role": "user", "content": text}]
    body = {"temperature": 0} | more.pop("extra_body", {})
    return {"model": NAME, "max_tokens": NUM_TOKENS, "messages": turns, "extra_body": body, **more}


def test_a_message_says_what_the_engine_says(client: Anthropic, expected: Completion) -> None:
    message = client.messages.create(**asked())
    [block] = message.content
    assert (block.type, block.text) == ("text", expected.text)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "max_tokens", NAME)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.prompt_tokens
    assert usage.output_tokens == NUM_TOKENS
    stopped = client.messages.create(**asked(stop_sequences=["c, d"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "c, d")


def test_a_tool_is_called_in_a_stream_and_its_result_answered(client: Anthropic) -> None:
    question = asked(
        "What will the weather be in Rome in 3 days?",
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=64,
    )
    with client.messages.stream(**question) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "forecast" and json.loads("".join(parts)) == call.input and len(parts) > 1
    jsonschema.validate(call.input, PARAMETERS)
    whole = client.messages.create(**question)
    assert [block.input for block in whole.content if block.type == "tool_use"] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 31 degrees."}
    turns = [
        *question["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(
        **question | {"messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 16}
    )
    assert [block.type for block in answer.content] == ["text"]
    assert (answer.usage.cache_read_input_tokens or 0) > 0


def test_errors_are_of_the_clients_classes(server: RealServer, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        client.messages.create(**asked() | {"model": "gpt-9"})
    with pytest.raises(anthropic.BadRequestError, match="unknown field: top_q") as raised:
        client.messages.create(**asked(extra_body={"top_q": 1}))
    assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(**asked("word " * CONTEXT))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**asked(extra_body={"temperature": -1}, stream=True))
    stranger = Anthropic(base_url=server.address, auth_token="wrong", api_key=None, max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="not accepted"):
        stranger.messages.create(**asked())
