"""POST /v1/messages: blocks, typed events and errors, as Anthropic's own client reads them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from outrider.server.settings import ServeSettings
from serving import HERMES, SCHEMA, THINKING, Serving, events, serving, user

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOLS = [
    {
        "name": "weather",
        "description": "Now.",
        "input_schema": SCHEMA,
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "clock", "input_schema": {"type": "object", "properties": {}}},
]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES) as running:
        yield running


def fields(said: str, **more: Any) -> dict[str, Any]:
    return {"messages": user(f"Say [[{said}]]"), "max_tokens": 300, "temperature": 0, **more}


def message(served: Serving, said: str, **more: Any) -> dict[str, Any]:
    response = served.post(PATH, **fields(said, **more))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Message.model_validate(body)
    Message.model_validate(body)
    return body


def stream(served: Serving, said: str, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, in an order that the API allows."""
    response = served.post(PATH, **fields(said, stream=True, **more))
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
    chat = served.post(
        "/v1/chat/completions",
        messages=turns,
        tools=[
            {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}
             | ({"description": "Now."} if t["name"] == "weather" else {})}
            for t in TOOLS
        ],
    ).json()  # fmt: skip
    counted = served.post(COUNT, **asked)
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}
    body = served.post(PATH, **asked, max_tokens=50, temperature=0).json()
    assert body["content"] == [{"type": "text", "text": "Noon."}]


def test_what_an_agent_sends_is_read(served: Serving) -> None:
    """Instructions between turns, effort from there on, deferred tools, and what may be left out."""

    def turns(*extra: dict[str, Any]) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = [
            *user("One"),
            {"role": "assistant", "content": "1"},
            *user("Say [[Two]]"),
        ]
        return [said[0], *extra[:1], *said[1:], *extra[1:]]

    def read(*extra: dict[str, Any]) -> Any:
        return served.post(COUNT, messages=turns(*extra)).json()["input_tokens"]

    note = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    for_now = note | {"clear_at": "next_user_message"}
    quiet = {"role": "system", "output_config": {"effort": "low"}}
    assert read(quiet, quiet) == read() == read(for_now)
    assert read(quiet, for_now) - read() == read(note) - read() > 0
    for_billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"}
    brief = {"type": "text", "text": "Be brief."}
    systems: list[Any] = [[for_billing, brief], "Be brief.", [for_billing], None]
    counts = [served.post(COUNT, messages=turns(), system=system).json() for system in systems]
    assert counts[0] == counts[1] and counts[2] == counts[3] == {"input_tokens": read()}
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}}]}
    known: dict[str, Any] = {"tools": [TOOLS[0] | {"defer_loading": True}], "max_tokens": 200}
    kept = served.post(PATH, messages=turns(quiet, note), context_management=edits, **known).json()
    assert kept["content"] == [{"type": "text", "text": "Two"}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "clear_at": "never"}]}, "messages[0].clear_at"),
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
    response = served.post(PATH, **fields("x") | wrong)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert said in body["error"]["message"]
    assert set(body["error"]) == {"type", "message"}


def test_a_failing_stream_ends_with_an_error() -> None:
    with serving(template=HERMES) as served:
        served.model.fail_from_call = len(served.model.calls) + 4
        found = events(served.post(PATH, **fields("A long answer that breaks off.", stream=True)))
    assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "api_error"


def test_a_model_of_any_name_is_answered_where_that_is_said(served: Serving) -> None:
    refused = served.post(PATH, **fields("x", model="claude-9"))
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
    settings = ServeSettings.model_validate({"any_model": True})
    with serving(settings=settings, template=HERMES) as lenient:
        assert message(lenient, "Hello!", model="claude-9")["model"] == "claude-9"
