"""The whole way, on the embedded model: what the server says is what the engine says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.core.params import SamplingParams
from outrider.models import cache_dir
from outrider.models.embedded import EMBEDDED_NAME
from outrider.server.assembly import create_app
from outrider.server.service import Service
from outrider.session import Session
from serving import events, user

MODEL = cache_dir() / "models" / EMBEDDED_NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="`outrider run` fetches the model; tests do not"),
]

CHAT = "/v1/chat/completions"
QUESTION = "Name three colours, then name them once more."


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.load(context_length=1024) as session:
        yield session


@pytest.fixture(scope="module")
def expected(session: Session) -> str:
    greedy = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0)
    return session.generate(user(QUESTION), max_tokens=48, sampling=greedy, speculate=False).text


@pytest.fixture(scope="module")
def client(session: Session, expected: str) -> Iterator[TestClient]:
    del expected  # it was generated before the worker took the engine over
    service = Service(session)
    service.start()
    yield TestClient(create_app(service))
    service.close()


def test_the_server_says_what_the_engine_says(client: TestClient, expected: str) -> None:
    body = {"messages": user(QUESTION), "temperature": 0, "max_tokens": 48}
    whole = client.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"]["content"] == expected
    chunks = events(client.post(CHAT, json=body | {"stream": True, "logprobs": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    scored = [one for c in chunks if (found := c["choices"][0]["logprobs"]) for one in found["content"]]
    assert b"".join(bytes(one["bytes"]) for one in scored).decode() == expected
    assert all(one["logprob"] <= 0 for one in scored)


def test_a_schema_holds(client: TestClient) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "legs": {"type": "integer", "maximum": 8},
        },
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    named = {"name": "animal", "schema": schema, "strict": True}
    response_format = {"type": "json_schema", "json_schema": named}
    body = {
        "messages": user("Describe a cat."),
        "response_format": response_format,
        "seed": 3,
        "max_tokens": 60,
    }
    answer = client.post(CHAT, json=body).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"name", "legs"}
    assert answer["outrider"]["forced_tokens"] > 0
    assert answer["outrider"]["target_calls"] < answer["outrider"]["generated_tokens"]


def test_a_tool_has_to_be_called(client: TestClient) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    body = {"messages": user("How is Rome?"), "tools": tools, "tool_choice": "required", "max_tokens": 80}
    choice = client.post(CHAT, json=body | {"parallel_tool_calls": False}).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_seed_repeats_an_answer(client: TestClient) -> None:
    body = {"messages": user("Tell me anything."), "seed": 11, "max_tokens": 12, "temperature": 1}
    body |= {"speculation": {"policy": "plain"}}
    first, second = (client.post(CHAT, json=body).json()["choices"][0]["message"] for _ in range(2))
    assert first == second
    other = client.post(CHAT, json=body | {"seed": 12}).json()["choices"][0]["message"]
    assert other != first


def test_tokens_there_and_back(client: TestClient) -> None:
    said = client.post("/tokenize", json={"messages": user("naïve 🙂"), "return_token_strs": True}).json()
    assert said["token_strs"][0] == "<|im_start|>"
    text = client.post("/detokenize", json={"tokens": said["tokens"]}).json()["content"]
    assert "naïve 🙂" in text
    answer = client.post(CHAT, json={"messages": user("naïve 🙂"), "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == said["count"]
