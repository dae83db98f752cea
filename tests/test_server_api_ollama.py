"""Ollama's endpoints, on the tiny exact model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.server.apis.ollama import OllamaChatRequest, plan_ollama_chat
from outrider.server.settings import ServeSettings
from serving import HERMES, SCHEMA, THINKING, Serving, serving, user

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES) as running:
        yield running


def chat(served: Serving, said: str, **more: Any) -> dict[str, Any]:
    body = {"messages": user(f"Say [[{said}]]"), "stream": False, "options": {"temperature": 0}} | more
    response = served.post(CHAT, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def lines(served: Serving, path: str, **body: Any) -> list[dict[str, Any]]:
    response = served.post(path, **{"options": {"temperature": 0}} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *found, last = [json.loads(line) for line in response.text.splitlines()]
    assert last["done"] and not any(line["done"] for line in found)
    return [*found, last]


def test_a_conversation_is_continued(served: Serving) -> None:
    body = chat(served, "Hello!", model="tiny:latest")
    assert body["message"] == {"role": "assistant", "content": "Hello!"}
    assert (body["model"], body["done"], body["done_reason"]) == ("tiny:latest", True, "stop")
    assert body["eval_count"] == body["outrider"]["generated_tokens"] == 7
    assert body["prompt_eval_count"] > 0 and body["total_duration"] >= body["eval_duration"] > 0
    cut = chat(served, "Hello!", options={"temperature": 0, "num_predict": 2, "num_ctx": 99_999})
    assert (cut["message"]["content"], cut["done_reason"]) == ("He", "length")
    assert "options.num_ctx: the context here is 2048 tokens" in cut["outrider"]["notices"]


def test_thinking_is_a_field_of_its_own() -> None:
    with serving(template=THINKING) as served:
        body = chat(served, "Hm.</think>Noon.", think=True)
        assert body["message"] == {"role": "assistant", "content": "Noon.", "thinking": "Hm."}
        found = lines(served, CHAT, messages=user("Say [[Hm.</think>Noon.]]"))
        assert "".join(line["message"].get("thinking", "") for line in found) == "Hm."
        shown = served.post("/api/show", model="tiny").json()
        assert "thinking" in shown["capabilities"]


def test_a_conversation_is_read_as_openais_is(served: Serving) -> None:
    arguments = {"city": "Rome", "degrees": 31}
    asked: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "User", "content": "What time?", "images": []},
            {
                "role": "assistant",
                "content": "Wait.",
                "thinking": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
            },
            {"role": "tool", "tool_name": "weather", "content": "31"},
        ]
    }
    plan = plan_ollama_chat(served.service, OllamaChatRequest.model_validate(asked), "")
    openai = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"function": {"name": "weather", "arguments": json.dumps(arguments)}}],
        },
        {"role": "tool", "name": "weather", "content": "31"},
    ]
    tokens = served.post("/tokenize", messages=openai).json()["tokens"]
    assert list(plan.requests[0].prompt) == tokens


def test_a_text_is_answered(served: Serving) -> None:
    asked = {"stream": False, "options": {"temperature": 0}, "prompt": "Say [[one]]", "system": "Be brief."}
    body = served.post(GENERATE, **asked).json()
    assert (body["response"], body["done_reason"]) == ("one", "stop")
    turns = [{"role": "system", "content": "Be brief."}, *user("Say [[one]]")]
    assert body["prompt_eval_count"] == served.post("/tokenize", messages=turns).json()["count"]
    found = lines(served, GENERATE, prompt="Say [[one]]", system="Be brief.")
    assert "".join(line["response"] for line in found) == "one"


def test_a_raw_text_is_continued_as_it_stands(served: Serving) -> None:
    asked = {"stream": False, "raw": True, "options": {"temperature": 0}, "prompt": f"[[{'long ' * 9}]]|"}
    body = served.post(GENERATE, **asked).json()
    assert body["response"] == "long " * 9
    scored = served.post(GENERATE, **asked, logprobs=True, top_logprobs=2).json()["logprobs"]
    assert [one["token"] for one in scored] == list("long " * 9)
    assert len(scored[0]["top_logprobs"]) == 2
    refused = served.post(GENERATE, **asked, system="x")
    assert refused.status_code == 400


def test_limits_hold() -> None:
    with serving(settings=ServeSettings(max_tokens=4), template=HERMES) as served:
        body = chat(served, "Hello!")
        assert (body["message"]["content"], body["done_reason"]) == ("Hell", "length")
        raw = served.post(GENERATE, raw=True, prompt="[[Hello!]]|", stream=False)
        assert raw.json()["eval_count"] == 4
        more = served.post(CHAT, messages=user("x"), options={"num_predict": 5})
        assert more.status_code == 400 and more.json()["error"].startswith("options.num_predict: 5 are more")


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": ""})]
)
def test_nothing_to_say_loads_the_model(served: Serving, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, model="tiny", keep_alive=0, **body).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_models_are_listed(served: Serving) -> None:
    client = served.client
    [card] = client.get("/api/tags").json()["models"]
    assert card["name"] == card["model"] == "tiny" and card["details"]["format"] == "gguf"
    [loaded] = client.get("/api/ps").json()["models"]
    assert loaded["name"] == "tiny" and loaded["context_length"] == 2048
    assert client.get("/api/version").json()["version"].count(".") == 2
    assert client.head("/api/version").status_code == client.head("/api/tags").status_code == 200
    shown = served.post("/api/show", name="tiny:latest").json()
    assert shown["capabilities"] == ["completion", "tools"] and shown["template"] == HERMES


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT, {"model": "other", "messages": user("x")}, "there is no model other"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images"),
        (GENERATE, {"prompt": "x", "images": ["aaaa"]}, "images"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "no tokens for filling in a middle"),
        (CHAT, {"messages": user("x"), "options": {"mirostat": 1}}, "mirostat"),
        (
            CHAT,
            {"messages": [user("x")[0] | {"tool_calls": [{"function": {"name": "f"}}]}]},
            "only the assistant",
        ),
        (CHAT, {"messages": user("x"), "options": {"unheard_of": 1}}, "options.unheard_of"),
        (CHAT, {"messages": user("x"), "format": {"type": "nonsense"}}, "format"),
        ("/api/show", {"model": "other"}, "there is no model other"),
        ("/api/embed", {"model": "tiny", "input": "x"}, "there is nothing at /api/embed"),
    ],
)
def test_errors_have_ollamas_shape(served: Serving, path: str, body: dict[str, Any], why: str) -> None:
    response = served.post(path, **body)
    assert response.status_code in (400, 404) and list(response.json()) == ["error"]
    assert why in response.json()["error"]


def test_a_stream_that_fails_ends_with_a_line_that_says_so() -> None:
    with serving(drafters=[]) as served:
        served.model.fail_from_call = 3
        response = served.post(CHAT, messages=user("Say [[something long]]"))
        last = json.loads(response.text.splitlines()[-1])
        assert list(last) == ["error"] and "failed" in last["error"]
