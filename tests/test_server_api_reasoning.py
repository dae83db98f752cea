"""Reasoning through the API: budgets under every name, efforts, and what later turns get."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.server.apis.chat import ChatRequest, plan_chat
from outrider.server.settings import ServeSettings
from serving import CALL, HERMES, SCHEMA, THINKING, Serving, serving, user

CHAT = "/v1/chat/completions"
SAID = "Hm, let me see.</think>Noon."


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=THINKING) as running:
        yield running


def message(served: Serving, said: str = SAID, **more: Any) -> dict[str, Any]:
    response = served.post(CHAT, messages=user(f"Say [[{said}]]"), temperature=0, max_tokens=200, **more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "reasoning_budget",
        "reasoning_budget_tokens",
        "thinking_budget_tokens",
        "thinking_token_budget",
        "thinking_budget",
    ],
)
def test_a_budget_cuts_the_reasoning(served: Serving, name: str) -> None:
    assert message(served)["reasoning_content"] == "Hm, let me see."
    assert message(served, SAID, **{name: 2})["reasoning_content"] == "Hm"
    assert message(served, SAID, **{name: 100})["reasoning_content"] == "Hm, let me see."
    assert "reasoning_content" not in message(served, SAID, **{name: 0})
    assert message(served, SAID, **{name: -1})["reasoning_content"] == "Hm, let me see."
    assert served.post(CHAT, **{"messages": user("x"), name: -2}).status_code == 400


def test_an_effort_that_the_template_does_not_know_is_a_budget(served: Serving) -> None:
    assert "reasoning_content" not in message(served, reasoning_effort="none")
    assert message(served, reasoning_effort="high")["reasoning_content"] == "Hm, let me see."
    body = ChatRequest.model_validate({"messages": user("x"), "reasoning_effort": "low"})
    thought = plan_chat(served.service, body, "").requests[0].thought
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
    template = HERMES + "<think>"
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    with serving(template=template) as served:
        asked = {"tools": [tool], "tool_choice": "required", "messages": user(f"Say [[{'so ' * 99}]]")}
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


def test_an_answer_that_has_begun_is_continued() -> None:
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
        others: list[dict[str, Any]] = [
            {"messages": user("x")},
            {"json_schema": {}},
            {"grammar": 'root ::= "a"'},
        ]
        for more in others:
            refused = served.post(CHAT, **asked | {"continue_final_message": True} | more)
            assert refused.status_code == 400
    with serving(template=THINKING) as served:
        thought = [*turns[:1], turns[1] | {"reasoning_content": "Hm."}]
        prompt = served.post("/apply-template", messages=thought, continue_final_message=True).json()[
            "prompt"
        ]
        assert prompt.endswith("|<think>Hm.</think>\n\none tw")
