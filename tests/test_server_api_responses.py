"""POST /v1/responses: objects, items and typed events, as OpenAI's own client reads them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.server.apis.responses import ResponseRequest, as_chat
from serving import CALL, HERMES, SCHEMA, Serving, events, serving

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES) as running:
        yield running


def stream(served: Serving, asked: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's types can read."""
    response = served.post(PATH, input=asked, stream=True, **fields)
    found = events(response)
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event:")]
    assert names == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "[DONE]" not in response.text
    for event in found:
        EVENT.validate_python(event)
    return found


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": "Wait."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    calls = [
        {"type": "function_call", "call_id": f"call_{i}", "name": "clock", "arguments": "{}"} for i in (1, 2)
    ]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "Noon."}
    asked = ResponseRequest.model_validate({"input": [thought, said, *calls, output, said, thought, said]})
    turns = [message.plain() for message in as_chat(asked).messages]
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant", "assistant"]
    assert (turns[0]["reasoning_content"], turns[0]["content"]) == ("Hm.", "Wait.")
    assert [call["id"] for call in turns[0]["tool_calls"]] == ["call_1", "call_2"]
    assert turns[3]["reasoning_content"] == "Hm."


def test_the_events_of_a_text(served: Serving) -> None:
    found = stream(served, "Say [[hello hello hello]]", speculation={"show_sources": True})
    kinds = [event["type"] for event in found]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
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


def test_the_events_of_text_and_a_call(served: Serving) -> None:
    found = stream(served, f"[[Wait. {CALL}]]", tools=[TOOL])
    added = [event["item"]["type"] for event in found if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert added == ["message", "function_call"] == [item["type"] for item in done]
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.added"] == [
        0,
        1,
    ]
    arguments = "".join(e["delta"] for e in found if e["type"] == "response.function_call_arguments.delta")
    assert arguments == done[1]["arguments"]
    assert json.loads(arguments) == {"city": "Rome", "degrees": 31}
    assert found[-1]["response"]["output"] == done
    assert all(item["status"] == "completed" for item in done)
