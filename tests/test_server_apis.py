"""Anthropic's messages, OpenAI's responses and Ollama's endpoints: objects, events and errors as their own
clients read them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.server.apis.ollama import OllamaChatRequest, plan_ollama_chat
from outrider.server.apis.responses import ResponseRequest, as_chat
from outrider.server.settings import ServeSettings
from serving import (
    CHAT,
    GENERATE,
    HERMES,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SCHEMA,
    THINKING,
    Serving,
    events,
    serving,
    user,
)

COUNT = f"{MESSAGES}/count_tokens"
CACHED = {"cache_control": {"type": "ephemeral"}}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "Now.", "input_schema": SCHEMA, **CACHED},
    {"name": "clock", "description": "", "input_schema": {"type": "object", "properties": {}}},
]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES) as running:
        yield running


# Messages


def fields(said: str, **more: Any) -> dict[str, Any]:
    return {"messages": user(f"Say [[{said}]]"), "max_tokens": 300, "temperature": 0, **more}


def message(served: Serving, said: str, **more: Any) -> dict[str, Any]:
    response = served.post(MESSAGES, **fields(said, **more))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Message.model_validate(body)
    return body


def stream(served: Serving, said: str, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, in an order that the API allows."""
    response = served.post(MESSAGES, **fields(said, stream=True, **more))
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event:")]
    kinds = [event["type"] for event in found]
    assert names == kinds and "[DONE]" not in response.text
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    num_opened, is_open = 0, False
    for event in found[2:-2]:
        EVENT.validate_python(event)
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == num_opened
            num_opened, is_open = num_opened + 1, True
        else:
            assert is_open and event["index"] == num_opened - 1
            is_open = event["type"] != "content_block_stop"
    assert not is_open
    return found


def blocks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the events of a stream add up to."""
    content: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            name = "json" if kind == "input_json_delta" else next(iter(delta))
            content[-1][name] += next(iter(delta.values()))
    for block in content:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    return content


def test_a_text_is_answered(served: Serving) -> None:
    body = message(served, "Hello!", system="Be brief.")
    assert body["content"] == [{"type": "text", "text": "Hello!"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == 7 and body["outrider"]["generated_tokens"] == 7
    turns = [{"role": "system", "content": "Be brief."}, *user("Say [[Hello!]]")]
    prompt_tokens = served.post("/tokenize", messages=turns).json()["count"]
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == prompt_tokens
    counted = served.post(COUNT, messages=turns[1:], system=[{"type": "text", "text": "Be brief."}])
    assert counted.json() == {"input_tokens": prompt_tokens}
    again = message(served, "Hello!", system="Be brief.")
    cached_tokens = again["usage"]["cache_read_input_tokens"]
    assert cached_tokens > prompt_tokens // 2
    assert again["usage"]["input_tokens"] == prompt_tokens - cached_tokens


def test_stop_reasons(served: Serving) -> None:
    body = message(served, "one two three", stop_sequences=["never", " three"])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", " three")
    assert body["content"][0]["text"] == "one two"
    body = message(served, "one two three", max_tokens=3)
    assert (body["stop_reason"], body["content"][0]["text"]) == ("max_tokens", "one")


def test_thinking_is_a_block_of_its_own() -> None:
    with serving(template=THINKING) as served:
        body = message(served, "Hm.</think>Noon.")
        thought, text = body["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
        assert text == {"type": "text", "text": "Noon."}
        found = stream(served, "Hm.</think>Noon.", thinking={"type": "enabled", "budget_tokens": 1024})
        assert blocks(found) == body["content"]
        cut = message(served, "Hm, so.</think>Noon.", thinking={"type": "enabled", "budget_tokens": 2})
        assert cut["content"][0]["thinking"] == "Hm"


def test_blocks_become_a_conversation(served: Serving) -> None:
    """The prompt is that of the same conversation in OpenAI's shape."""
    arguments = {"city": "Rome", "degrees": 31}
    asked = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "What time?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "call_1", "name": "weather", "input": arguments},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "no net", "is_error": True},
                    {"type": "text", "text": "[[Noon.]]"},
                ],
            },
        ],
        "tools": TOOLS,
    }
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: no net"},
        {"role": "user", "content": "[[Noon.]]"},
    ]
    functions = [
        {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        for tool in TOOLS
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    chat = served.post(CHAT, messages=turns, tools=tools).json()
    counted = served.post(COUNT, **asked)
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    body = served.post(MESSAGES, **asked, max_tokens=50, temperature=0).json()
    assert body["content"] == [{"type": "text", "text": "Noon."}]


def test_what_an_agent_sends_is_read(served: Serving) -> None:
    """Instructions between turns, deferred tools, and what may be left out."""
    turns = [*user("One"), {"role": "assistant", "content": "1"}, *user("Say [[Two]]")]

    def read(*extra: dict[str, Any], **more: Any) -> Any:
        return served.post(COUNT, messages=[*turns[:2], *extra, turns[2]], **more).json()["input_tokens"]

    note = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    assert read({"role": "system", "output_config": {"effort": "low"}}) == read()
    assert read(note | {"clear_at": "never"}) == read(note) > read()
    for_billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"}
    brief = {"type": "text", "text": "Be brief."}
    assert read(system=[for_billing, brief]) == read(system="Be brief.")
    assert read(system=[for_billing]) == read()
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}}]}
    tools = [TOOLS[0] | {"defer_loading": True}]
    asked = {"messages": [*turns, note], "context_management": edits, "tools": tools, "max_tokens": 200}
    assert served.post(MESSAGES, **asked).json()["content"] == [{"type": "text", "text": "Two"}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]},
         "thinking is not a block of the role system"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text, thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b",
                                                     "input": {}}]}]},
         "tool_use is not a block of the role user"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
         "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_its_shape(served: Serving, wrong: dict[str, Any], said: str) -> None:
    response = served.post(MESSAGES, **fields("x") | wrong)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert said in body["error"]["message"]
    assert set(body["error"]) == {"type", "message"}


def test_a_model_of_any_name_is_answered_where_that_is_said(served: Serving) -> None:
    refused = served.post(MESSAGES, **fields("x", model="claude-9"))
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
    settings = ServeSettings.model_validate({"any_model": True})
    with serving(settings=settings, template=HERMES) as lenient:
        assert message(lenient, "Hello!", model="claude-9")["model"] == "claude-9"


# Responses


def response_events(served: Serving, asked: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's types can read."""
    response = served.post(RESPONSES, input=asked, stream=True, **fields)
    found = events(response)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event:")]
    assert names == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "[DONE]" not in response.text
    for event in found:
        RESPONSE_EVENT.validate_python(event)
    return found


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": "Wait."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    calls = [
        {"type": "function_call", "call_id": f"call_{i}", "name": "clock", "arguments": "{}"} for i in (1, 2)
    ]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "Noon."}
    items = [thought, thought, said, *calls, output, said, thought, said]
    asked = ResponseRequest.model_validate({"input": items})
    turns = [message.plain() for message in as_chat(asked).messages]
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant", "assistant"]
    assert (turns[0]["reasoning_content"], turns[0]["content"]) == ("Hm.Hm.", "Wait.")
    assert [call["id"] for call in turns[0]["tool_calls"]] == ["call_1", "call_2"]
    assert turns[3]["reasoning_content"] == "Hm."


def test_the_events_of_a_text(served: Serving) -> None:
    found = response_events(served, "Say [[hello hello hello]]", speculation={"show_sources": True})
    shown = [event for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in shown) == "hello hello hello"
    assert "".join(text for event in shown for text, _ in event["outrider"]["pieces"]) == "hello hello hello"
    last = found[-1]["response"]
    OpenAIResponse.model_validate(last)
    assert last["output"] == [found[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == "hello hello hello"
    assert found[0]["response"]["id"] == last["id"]
    assert found[0]["response"]["output"] == [] and found[2]["item"]["content"] == []
    assert last["outrider"]["drafters"]["lookup"]["accepted_tokens"] > 0


# Ollama


def ask_ollama(served: Serving, said: str, **more: Any) -> dict[str, Any]:
    body = {"messages": user(f"Say [[{said}]]"), "stream": False, "options": {"temperature": 0}} | more
    response = served.post(OLLAMA, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_conversation_is_continued(served: Serving) -> None:
    body = ask_ollama(served, "Hello!", model="tiny:latest")
    assert body["message"] == {"role": "assistant", "content": "Hello!"}
    assert (body["model"], body["done"], body["done_reason"]) == ("tiny:latest", True, "stop")
    assert body["eval_count"] == body["outrider"]["generated_tokens"] == 7
    assert body["prompt_eval_count"] > 0 and body["total_duration"] >= body["eval_duration"] > 0
    cut = ask_ollama(served, "Hello!", options={"temperature": 0, "num_predict": 2, "num_ctx": 99_999})
    assert (cut["message"]["content"], cut["done_reason"]) == ("He", "length")
    assert "options.num_ctx: the context here is 2048 tokens" in cut["outrider"]["notices"]


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


def test_limits_hold() -> None:
    with serving(settings=ServeSettings(max_tokens=4), template=HERMES) as served:
        body = ask_ollama(served, "Hello!")
        assert (body["message"]["content"], body["done_reason"]) == ("Hell", "length")
        raw = served.post(GENERATE, raw=True, prompt="[[Hello!]]|", stream=False)
        assert raw.json()["eval_count"] == 4
        more = served.post(OLLAMA, messages=user("x"), options={"num_predict": 5})
        assert more.status_code == 400 and more.json()["error"].startswith("options.num_predict: 5 are more")


@pytest.mark.parametrize(
    ("path", "body"), [(OLLAMA, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": ""})]
)
def test_nothing_to_say_loads_the_model(served: Serving, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, model="tiny", keep_alive=0, **body).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_what_clients_look_up_first(served: Serving) -> None:
    client = served.client
    [loaded] = client.get("/api/ps").json()["models"]
    assert loaded["name"] == "tiny" and loaded["context_length"] == 2048
    assert client.get("/api/version").json()["version"].count(".") == 2
    assert client.head("/api/version").status_code == client.head("/api/tags").status_code == 200
    assert served.post("/api/show", name="tiny:latest").json()["capabilities"] == ["completion", "tools"]


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (OLLAMA, {"model": "other", "messages": user("x")}, "there is no model other"),
        (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": ["aaaa"]}]}, "messages[0].images"),
        (GENERATE, {"prompt": "x", "images": ["aaaa"]}, "images"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "x"}, "system: it needs the chat template"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "no tokens for filling in a middle"),
        (OLLAMA, {"messages": user("x"), "options": {"mirostat": 1}}, "mirostat"),
        (
            OLLAMA,
            {"messages": [user("x")[0] | {"tool_calls": [{"function": {"name": "f"}}]}]},
            "only the assistant",
        ),
        (OLLAMA, {"messages": user("x"), "options": {"unheard_of": 1}}, "options.unheard_of"),
        (OLLAMA, {"messages": user("x"), "format": {"type": "nonsense"}}, "format"),
        ("/api/show", {"model": "other"}, "there is no model other"),
        ("/api/embed", {"model": "tiny", "input": "x"}, "there is nothing at /api/embed"),
    ],
)
def test_errors_have_ollamas_shape(served: Serving, path: str, body: dict[str, Any], why: str) -> None:
    response = served.post(path, **body)
    assert response.status_code in (400, 404) and list(response.json()) == ["error"]
    assert why in response.json()["error"]
