"""What limits an answer, in every server's words; tools and reasoning, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from serving import Serving, events, serving, user

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
STRICT = {"name": "weather", "schema": SCHEMA, "strict": True}
WEATHER = '{"city": "Rome", "degrees": 31}'
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call></tool_call>.
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}|"""
"""As Qwen's: tools in front, calls between markers, and the answer after the last bar."""
THINKING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}|<think>"


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
        {"guided_json": SCHEMA},
    ],
)  # fmt: skip
def test_a_schema_holds_whoever_names_it(served: Serving, fields: dict[str, Any]) -> None:
    assert text(served, WEATHER, **fields) == WEATHER
    # The model would say something else, and may not.
    found = json.loads(text(served, '{"town": "Rome"}', max_tokens=120, temperature=0, **fields))
    assert set(found) == {"city", "degrees"}


def test_any_object_is_an_object(served: Serving) -> None:
    fields = {"response_format": {"type": "json_object"}, "temperature": 0}
    assert text(served, '{"a": [1]}', **fields) == '{"a": [1]}'
    assert text(served, "[1]", max_tokens=20, **fields).startswith("{")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, "no"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes"),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc"),
        ({"guided_regex": "[a-c]{3}"}, "cab"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "blue"),
        ({"guided_choice": ["red", "blue"]}, "red"),
    ],
)
def test_a_grammar_holds_whoever_names_it(served: Serving, fields: dict[str, Any], said: str) -> None:
    assert text(served, said, **fields) == said
    assert text(served, "something else", **fields) != "something else"


def test_a_completion_is_limited_too(served: Serving) -> None:
    body = served.post("/v1/completions", prompt="[[zzz]]|", guided_choice=["red"]).json()
    assert body["choices"][0]["text"] == "red"


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


def test_a_schema_that_is_not_strict_tells_what_is_not_enforced(served: Serving) -> None:
    named = {"schema": {**SCHEMA, "not": {"required": ["x"]}}, "strict": False}
    fields = {"response_format": {"type": "json_schema", "json_schema": named}}
    body = chat(served, messages=user(f"[[{WEATHER}]]"), **fields)
    assert body["choices"][0]["message"]["content"] == WEATHER
    assert any("not" in notice for notice in body["outrider"]["notices"])


# Tools

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "degrees": 31}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def ask(served: Serving, said: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": user(f"[[{said}]]"), "tools": TOOLS, "temperature": 0, "max_tokens": 300, **fields}
    [choice] = chat(served, **body)["choices"]
    found: dict[str, Any] = choice
    return found


def test_a_tool_is_called(hermes: Serving) -> None:
    choice = ask(hermes, CALL)
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "degrees": 31}


def test_no_tool_need_be_called(hermes: Serving) -> None:
    choice = ask(hermes, "Just talking.")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Just talking.", "stop")
    assert "tool_calls" not in choice["message"]


def test_an_answer_is_limited_beside_tools_that_may_be_called(hermes: Serving) -> None:
    limit = {"type": "json_schema", "json_schema": STRICT}
    called = ask(hermes, CALL, response_format=limit)["message"]
    assert called["tool_calls"][0]["function"]["name"] == "weather" and not called["content"]
    said = ask(hermes, WEATHER, response_format=limit)["message"]
    assert json.loads(said["content"]) == json.loads(WEATHER) and "tool_calls" not in said
    forced = ask(hermes, "Just talking.", response_format=limit)["message"]
    assert forced["content"].startswith('{"city": "')
    broken = hermes.post(CHAT, messages=user("hi"), tools=TOOLS, guided_regex="(")
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "guided_regex")


def test_several_tools_are_called_unless_that_is_forbidden(hermes: Serving) -> None:
    both = f"{CALL}\n{CLOCK}"
    names = [call["function"]["name"] for call in ask(hermes, both)["message"]["tool_calls"]]
    assert names == ["weather", "clock"]
    single = ask(hermes, both, parallel_tool_calls=False)["message"]["tool_calls"]
    assert [call["function"]["name"] for call in single] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
def test_a_tool_has_to_be_called(hermes: Serving, choice: Any, names: set[str]) -> None:
    found = ask(hermes, "Just talking.", tool_choice=choice)
    assert {call["function"]["name"] for call in found["message"]["tool_calls"]} <= names
    for call in found["message"]["tool_calls"]:
        json.loads(call["function"]["arguments"])


def test_without_a_choice_nothing_is_a_call(hermes: Serving) -> None:
    choice = ask(hermes, CLOCK, tool_choice="none")
    assert choice["message"]["content"] == CLOCK
    assert "tool_calls" not in choice["message"]


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


def test_the_result_of_a_call_reaches_the_model(hermes: Serving) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *user("What time is it?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "[[It is noon.]]"},
    ]
    choice = chat(hermes, messages=messages, tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] == "It is noon."


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


@pytest.fixture(scope="module")
def thinking() -> Iterator[Serving]:
    with serving(template=THINKING) as running:
        yield running


def test_reasoning_is_told_apart(thinking: Serving) -> None:
    said = "Let me see.</think>\n\nFour."
    message = chat(thinking, messages=user(f"[[{said}]]"))["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("Let me see.", "Four.")
    body = chat(thinking, messages=user(f"[[{said}]]"))
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me see.</think>\n\n")


def test_reasoning_is_streamed_as_such(thinking: Serving) -> None:
    body = {
        "messages": user("[[Hm, hm.</think>Four.]]"),
        "stream": True,
        "speculation": {"show_sources": True},
    }
    chunks = events(thinking.post(CHAT, **body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."
    pieces = [piece for chunk in chunks for piece in chunk.get("outrider", {}).get("pieces", [])]
    assert "".join(text for text, _ in pieces) == "Four."


def test_a_schema_holds_behind_the_reasoning(thinking: Serving) -> None:
    said = f"Rome, I think.</think>{WEATHER}"
    message = chat(thinking, messages=user(f"[[{said}]]"), json_schema=SCHEMA)["choices"][0]["message"]
    assert message["reasoning_content"] == "Rome, I think."
    assert message["content"] == WEATHER


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
