"""What limits an answer, in every server's words; tools and reasoning, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from serving import CALL, HERMES, SCHEMA, TOOLS, WEATHER, Serving, events, serving, user

CHAT = "/v1/chat/completions"
STRICT = {"name": "weather", "schema": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(call_s=0) as running:
        yield running


@pytest.fixture(scope="module")
def hermes() -> Iterator[Serving]:
    with serving(template=HERMES) as running:
        yield running


def chat(served: Serving, **fields: Any) -> dict[str, Any]:
    response = served.post(CHAT, **fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json())
    body: dict[str, Any] = response.json()
    return body


def text(served: Serving, said: str, **fields: Any) -> str:
    """What comes of an answer that the model would give, under these fields."""
    content: str = chat(served, messages=user(f"[[{said}]]"), **fields)["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": STRICT}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)  # fmt: skip
def test_a_schema_holds_whoever_names_it(served: Serving, fields: dict[str, Any]) -> None:
    assert text(served, WEATHER, **fields) == WEATHER
    # The model would say something else, and may not.
    found = json.loads(text(served, '{"town": "Rome"}', max_tokens=120, temperature=0, **fields))
    assert set(found) == {"city", "degrees"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, "no"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "blue"),
    ],
)
def test_a_grammar_holds_whoever_names_it(served: Serving, fields: dict[str, Any], said: str) -> None:
    assert text(served, said, **fields) == said
    assert text(served, "something else", **fields) != "something else"


def test_white_space_can_be_left_out(served: Serving) -> None:
    compact = WEATHER.replace(" ", "")
    fields = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    assert text(served, compact, **fields) == compact


def test_forced_text_costs_no_call(served: Serving) -> None:
    fields = {"messages": user(f"[[{WEATHER}]]"), "json_schema": SCHEMA, "temperature": 0}
    forced = chat(served, **fields)
    off = chat(served, **fields, speculation={"fast_forward": "off", "policy": "plain"})
    assert forced["choices"] == off["choices"]
    assert forced["outrider"]["forced_tokens"] > 10 > off["outrider"]["forced_tokens"] == 0
    assert forced["outrider"]["target_calls"] < off["outrider"]["target_calls"]
    assert forced["outrider"]["drafters"]["grammar"]["accepted_tokens"] == forced["outrider"]["forced_tokens"]


# Tools


def ask(served: Serving, said: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": user(f"[[{said}]]"), "tools": TOOLS, "temperature": 0, "max_tokens": 300, **fields}
    [choice] = chat(served, **body)["choices"]
    found: dict[str, Any] = choice
    return found


def test_an_answer_is_limited_beside_tools_that_may_be_called(hermes: Serving) -> None:
    limit = {"type": "json_schema", "json_schema": STRICT}
    called = ask(hermes, CALL, response_format=limit)["message"]
    assert called["tool_calls"][0]["function"]["name"] == "weather" and not called["content"]
    said = ask(hermes, WEATHER, response_format=limit)["message"]
    assert json.loads(said["content"]) == json.loads(WEATHER) and "tool_calls" not in said
    forced = ask(hermes, "Just talking.", response_format=limit)["message"]
    assert forced["content"].startswith('{"city": "')
    broken = hermes.post(CHAT, messages=user("hi"), tools=TOOLS, structured_outputs={"regex": "("})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "structured_outputs.regex")


def test_a_call_is_streamed(hermes: Serving) -> None:
    body = {"messages": user(f"[[Wait. {CALL}]]"), "tools": TOOLS, "stream": True, "temperature": 0}
    chunks = events(hermes.post(CHAT, **body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    # OpenAI's clients take the first chunk of a call as it is: nothing may be added to the call in it.
    openings = [delta["tool_calls"] for delta in deltas if "id" in delta.get("tool_calls", [{}])[0]]
    assert [len(opening) for opening in openings] == [1]
    first, *others = calls
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "weather")
    assert first["id"].startswith("call_")
    assert all("id" not in call and "name" not in call["function"] for call in others)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Rome", "degrees": 31}
    assert len(others) > 2, "the arguments came all at once"
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "Wait."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_whose_schema_is_not_enforced_are_said(hermes: Serving) -> None:
    loose = {**SCHEMA, "not": {}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": loose}}]
    body = chat(hermes, messages=user(f"[[{CALL}]]"), tools=tools)
    assert body["outrider"]["notices"]
    strict = [{"type": "function", "function": {"name": "weather", "parameters": loose, "strict": True}}]
    refused = hermes.post(CHAT, messages=user("hi"), tools=strict)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"


# Reasoning


def test_effort_is_in_the_templates_words() -> None:
    template = "{% if not enable_thinking %}calm {% endif %}{{ tone }}{{ messages[0].content }}|"
    with serving(template=template) as served:

        def length(**fields: Any) -> Any:
            return chat(served, messages=user("[[a]]"), **fields)["usage"]["prompt_tokens"]

        base = len("[[a]]|")
        assert length(reasoning_effort="none") == base + len("calm ")
        assert length(reasoning_effort="high") == base
        assert length(chat_template_kwargs={"enable_thinking": True, "tone": "Sir, "}) == base + len("Sir, ")
        unread = chat(served, messages=user("[[a]]"), chat_template_kwargs={"mood": 1})
        assert any("mood" in notice for notice in unread["outrider"]["notices"])
