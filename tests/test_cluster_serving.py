"""`outrider serve --ray` with two replicas of the embedded model, and OpenAI's client against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any
from urllib.request import Request, urlopen

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_helpers import PATIENCE_S
from real_server import ARGUMENTS, KEY, MODEL, NAME, ONE_AT_ONCE, REASON, RealServer, real_server

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason=REASON)]
CONTEXT = 1024
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """It has to drain and end well when it gets SIGTERM."""
    folder = tmp_path_factory.mktemp("replicas")
    with real_server(folder, *ARGUMENTS, "-c", str(CONTEXT), "--ray", "local", "--replicas", "2") as server:
        yield server


def client(served: RealServer, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.base_url, api_key=key, max_retries=0, timeout=2 * PATIENCE_S)


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    given = {"model": NAME, "max_tokens": 12, "temperature": 0} | given
    messages: Any = [{"role": "user", "content": text}]
    create: Any = client.chat.completions.create
    return create(messages=messages, **given)


def test_a_stream_is_the_whole_answer(served: RealServer) -> None:
    with client(served) as asked:
        whole = ask(asked, "What is a river?")
        chunks = [*ask(asked, "What is a river?", stream=True)]
    assert len(chunks) > 3
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content != ""
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "length"


def test_tools_and_schemas_hold(served: RealServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    with client(served) as asked:
        said = ask(asked, "Name a city.", response_format=wanted, max_tokens=60)
        called = ask(
            asked,
            "Look Ulm up.",
            tools=[TOOL],
            tool_choice="required",
            max_tokens=80,
            parallel_tool_calls=False,
        )
    assert json.loads(said.choices[0].message.content).keys() == {"city", "large"}
    [call] = called.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments).keys() == {"city", "large"}


def test_keys_and_their_limits_count_once_for_all(served: RealServer) -> None:
    with client(served, "another") as asked, pytest.raises(openai.AuthenticationError):
        ask(asked, "Hello")
    begun, end = Event(), Event()

    def hold() -> None:
        with client(served, ONE_AT_ONCE) as asked:
            stream = ask(asked, "Count to a hundred.", max_tokens=400, stream=True)
            next(iter(stream))
            begun.set()
            end.wait(PATIENCE_S)
            stream.close()

    with ThreadPoolExecutor() as pool, client(served, ONE_AT_ONCE) as asked:
        holding = pool.submit(hold)
        assert begun.wait(2 * PATIENCE_S)
        with pytest.raises(openai.RateLimitError):
            ask(asked, "Hello", extra_headers={"x-session-id": "another replica's"})
        end.set()
        holding.result()


def test_bad_requests_are_answered_as_on_one_machine(served: RealServer) -> None:
    with client(served) as asked:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ask(asked, "Hello", temperature=-3)
        with pytest.raises(openai.BadRequestError, match=r"(?i)context|tokens"):
            ask(asked, "long " * 3 * CONTEXT)


def test_a_conversation_finds_its_kv_and_both_replicas_work(served: RealServer) -> None:
    long = "Keep this in mind: " + ", ".join(f"thing {n}" for n in range(40))
    with client(served) as asked:
        for number in range(8):
            text = f"{number}. {long}"
            ask(asked, text, max_tokens=2)
            usage = ask(asked, text, max_tokens=2).usage
            assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens / 2
    assert served.metric("outrider_prompt_tokens_total") > 0
    request = Request(f"{served.address}/metrics", headers={"Authorization": f"Bearer {KEY}"})

    def replicas() -> set[str]:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
            samples = [s for f in families for s in f.samples if s.name == "outrider_prompt_tokens_total"]
        return {sample.labels["replica"] for sample in samples if sample.value}

    assert len(replicas()) == 2
    with urlopen(f"{served.address}/health", timeout=PATIENCE_S) as health:
        assert health.status == 200
