"""OpenAI's client for Python and a model that was trained to call tools: it decides whether it calls one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from outrider.models.hub import cache_dir
from real_server import KEY, NAME, real_server
from serving import user

QWEN = cache_dir() / "models" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not QWEN.exists(), reason="it is not in the cache; tests fetch nothing"),
]

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city.",
            "parameters": PARAMETERS,
        },
    }
]
QUESTION: Any = user("How warm is it in Oslo, in celsius?")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("server")
    with (
        real_server(folder, "-c", "2048", model=QWEN) as server,
        OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0) as client,
    ):
        yield client
        assert server.is_idle()


def test_it_calls_by_itself_and_reads_the_result(client: OpenAI) -> None:
    settings: Any = {"model": NAME, "temperature": 0, "tools": TOOLS, "max_completion_tokens": 96}
    with client.chat.completions.stream(messages=QUESTION, **settings) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PARAMETERS)
    assert "oslo" in arguments["city"].lower() and "<tool_call>" not in (choice.message.content or "")
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "-7 degrees"}
        for call in choice.message.tool_calls
    ]
    turns: Any = [*QUESTION, choice.message, *results]
    answer = client.chat.completions.create(messages=turns, **settings | {"tool_choice": "none"})
    assert "-7" in (answer.choices[0].message.content or "")
