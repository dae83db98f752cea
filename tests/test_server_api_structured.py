"""What limits an answer, in every server's words; tools, and reasoning with its budgets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from outrider.server.apis.chat import ChatRequest, plan_chat
from outrider.server.settings import ServeSettings
from serving import CALL, CHAT, CLOCK, HERMES, SCHEMA, THINKING, TOOLS, WEATHER, Serving, serving, user

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


@pytest.mark.parametrize(
    ("said", "fields", "names"),
    [
        (f"{CALL}\n{CLOCK}", {}, ["weather", "clock"]),
        (f"{CALL}\n{CLOCK}", {"parallel_tool_calls": False}, ["weather"]),
        ("No.", {"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ["clock"]),
        (CLOCK, {"tool_choice": "none"}, []),
    ],
    ids=["both", "one alone", "named", "none"],
)
def test_what_may_be_called(hermes: Serving, said: str, fields: dict[str, Any], names: list[str]) -> None:
    calls = ask(hermes, said, **fields)["message"].get("tool_calls") or []
    assert [call["function"]["name"] for call in calls] == names


def test_tools_whose_schema_is_not_enforced_are_said(hermes: Serving) -> None:
    function: dict[str, Any] = {"name": "weather", "parameters": {**SCHEMA, "not": {}}}
    asked = {"messages": user(f"[[{CALL}]]"), "tools": [{"type": "function", "function": function}]}
    assert chat(hermes, **asked)["outrider"]["notices"]
    function["strict"] = True
    refused = hermes.post(CHAT, **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


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


SAID = "Hm, let me see.</think>Noon."


@pytest.fixture(scope="module")
def thinking() -> Iterator[Serving]:
    with serving(template=THINKING) as running:
        yield running


def message(served: Serving, said: str = SAID, **more: Any) -> dict[str, Any]:
    response = served.post(CHAT, messages=user(f"Say [[{said}]]"), temperature=0, max_tokens=200, **more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def test_a_budget_cuts_the_reasoning(thinking: Serving) -> None:
    for budget, expected in ((None, "Hm, let me see."), (2, "Hm"), (100, "Hm, let me see."), (0, None)):
        assert message(thinking, reasoning_budget=budget).get("reasoning_content") == expected
    for name in (
        "reasoning_budget_tokens",
        "thinking_budget_tokens",
        "thinking_token_budget",
        "thinking_budget",
    ):
        assert message(thinking, SAID, **{name: 2})["reasoning_content"] == "Hm"
    assert message(thinking, reasoning_budget=-1)["reasoning_content"] == "Hm, let me see."
    assert thinking.post(CHAT, messages=user("x"), reasoning_budget=-2).status_code == 400


def test_an_effort_that_the_template_does_not_know_is_a_budget(thinking: Serving) -> None:
    assert "reasoning_content" not in message(thinking, reasoning_effort="none")
    assert message(thinking, reasoning_effort="high")["reasoning_content"] == "Hm, let me see."
    body = ChatRequest.model_validate({"messages": user("x"), "reasoning_effort": "low"})
    thought = plan_chat(thinking.service, body, "").requests[0].thought
    assert thought is not None and thought.budget == 2048
    with serving() as plain:  # nothing is known of reasoning
        assert plain.post(CHAT, messages=user("x"), reasoning_effort="low").status_code == 400
        answer = plain.post(CHAT, messages=user("x"), reasoning_budget=5).json()
        assert "this model's template has no reasoning" in answer["outrider"]["notices"][0]


def test_the_servers_budget_holds_where_a_request_says_nothing() -> None:
    settings = ServeSettings(reasoning_budget=2, reasoning_budget_message=" Enough.")
    with serving(template=THINKING, settings=settings) as served:
        assert message(served)["reasoning_content"] == "Hm Enough."
        assert message(served, reasoning_budget=5)["reasoning_content"] == "Hm, l Enough."
        assert message(served, reasoning_budget=-1)["reasoning_content"] == "Hm, let me see."


def test_a_required_call_has_room_after_the_reasoning() -> None:
    with serving(template=HERMES + "<think>") as served:
        asked = {"tools": TOOLS[:1], "tool_choice": "required", "messages": user(f"Say [[{'so ' * 99}]]")}
        body = served.post(CHAT, **asked, max_tokens=200, temperature=0).json()
        [choice] = body["choices"]
        assert len(choice["message"]["reasoning_content"]) <= 100
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert "tool_choice: reasoning is limited to 100 tokens" in body["outrider"]["notices"]
        ours = served.post(CHAT, **asked, max_tokens=200, temperature=0, reasoning_budget=3).json()
        assert len(ours["choices"][0]["message"]["reasoning_content"]) == 2  # "so ": white space is no part
        free = served.post(CHAT, **asked | {"messages": user(f"Say [[Hm.</think>{CALL}]]")}, temperature=0)
        assert free.json()["choices"][0]["message"]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}|", False),
        ("{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}|", True),
        ("{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}|", True),
        ("{% for m in messages %}{{ m['reasoning'] }}{{ m.content }}{% endfor %}|", True),
    ],
)
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_later_turns_have_the_reasoning_that_the_template_wants(
    template: str, kept: bool, field: str
) -> None:
    with serving(template=template) as served:
        turns = [*user("a"), {"role": "assistant", "content": "b", field: "thought"}, *user("c")]
        prompt = served.post("/apply-template", messages=turns).json()["prompt"]
        assert ("thought" in prompt) == kept


def test_an_answer_that_has_begun_is_continued(thinking: Serving) -> None:
    """The fake model says what is left of its answer, so that it shows where it went on."""
    turns = [*user("Say [[one two three]]"), {"role": "assistant", "content": "one tw"}]
    with serving() as served:
        asked = {"messages": turns, "temperature": 0}
        answer = served.post(CHAT, **asked, continue_final_message=True).json()
        assert answer["choices"][0]["message"]["content"] == "o three"
        message = served.post("/v1/messages", **asked, max_tokens=50).json()
        assert message["content"][0]["text"] == "o three"
        chat = served.post("/api/chat", messages=turns, stream=False, options={"temperature": 0}).json()
        assert chat["message"]["content"] == "o three"
        prompt = served.post("/apply-template", messages=turns, continue_final_message=True).json()["prompt"]
        assert prompt.endswith("|one tw")
        others: Any = ({"messages": user("x")}, {"json_schema": {}}, {"grammar": 'root ::= "a"'})
        for more in others:
            refused = served.post(CHAT, **asked | {"continue_final_message": True} | more)
            assert refused.status_code == 400
    thought = {
        "messages": [turns[0], turns[1] | {"reasoning_content": "Hm."}],
        "continue_final_message": True,
    }
    prompt = thinking.post("/apply-template", **thought).json()["prompt"]
    assert prompt.endswith("|<think>Hm.</think>\n\none tw")
