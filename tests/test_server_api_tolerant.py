"""What benchmarks and clients send beside the text: taken, and said where it has no effect."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.server.settings import ServeSettings
from serving import HERMES, Serving, serving, user

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LLAMA, OLLAMA, GENERATE = "/completion", "/api/chat", "/api/generate"
SAY = "Say [[one two]]|"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Say [[one two]]")},
    TEXT: {"prompt": SAY, "max_tokens": 50},
    RESPONSES: {"input": "Say [[one two]]"},
    MESSAGES: {"messages": user("Say [[one two]]"), "max_tokens": 50},
    LLAMA: {"prompt": SAY},
    OLLAMA: {"messages": user("Say [[one two]]"), "stream": False},
    GENERATE: {"prompt": SAY, "raw": True, "stream": False},
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
LOOK = {"name": "look", "parameters": {"type": "object"}}
NULL = [*user("Hi"), {"role": "assistant", "content": None}, *user("Say [[one two]]")]


def said_by(part: str) -> list[dict[str, Any]]:
    """A message with an id, and a part that is to be cached."""
    return [{"id": "m1", "role": "user", "content": [{"type": part, "text": "Say [[one two]]"} | CACHED]}]


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES, context_tokens=8192) as running:
        yield running


def text_of(path: str, body: dict[str, Any]) -> Any:
    """The text of an answer, whole."""
    if path == CHAT:
        return body["choices"][0]["message"]["content"]
    if path == RESPONSES:
        return body["output"][-1]["content"][0]["text"]
    if path == MESSAGES:
        return body["content"][-1]["text"]
    if path == OLLAMA:
        return body["message"]["content"]
    return body["choices"][0]["text"] if path == TEXT else body["content" if path == LLAMA else "response"]


@pytest.mark.parametrize(
    ("path", "more", "notice"),
    [
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, ""),
        *((path, {"max_tokens": -1}, "") for path in (CHAT, TEXT, MESSAGES, LLAMA)),
        *((path, {"max_completion_tokens": 50}, "") for path in (CHAT, LLAMA)),
        (TEXT, {"max_tokens": None, "max_completion_tokens": 50}, ""),
        (RESPONSES, {"max_output_tokens": -1}, ""),
        (OLLAMA, {"options": {"num_predict": -1}}, ""),
        *((path, {"messages": said_by("text")}, "") for path in (CHAT, MESSAGES)),
        (RESPONSES, {"input": said_by("input_text")}, ""),
        (OLLAMA, {"messages": [user("Say [[one two]]")[0] | {"id": "m1"}]}, ""),
        *((path, {"messages": NULL}, "") for path in (CHAT, MESSAGES, OLLAMA)),
        (RESPONSES, {"input": NULL}, ""),
        (CHAT, {"verbosity": "low", "audio": None, "no_such_field": None}, ""),
        (MESSAGES, {"context_management": {"edits": []}, "stop": ["never"]}, ""),
        (RESPONSES, {"reasoning": {"generate_summary": "concise"}, "truncation": "auto", "store": True}, ""),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
                               *user("Say [[one two]]")]}, ""),
        (CHAT, {"tools": [{"type": "function", "function": LOOK} | CACHED]}, ""),
        *((path, {"tools": [SEARCH]}, "web_search_20250305") for path in (CHAT, RESPONSES, MESSAGES, OLLAMA)),
        (RESPONSES, {"tools": [{"type": "function"} | LOOK, {"type": "custom", "name": "x"}]}, "custom"),
        (MESSAGES, {"tools": [SEARCH, {"name": "look", "input_schema": {}} | CACHED]}, "web_search_20250305"),
    ],
)  # fmt: skip
def test_it_is_taken(served: Serving, path: str, more: dict[str, Any], notice: str) -> None:
    response = served.post(path, **LEAST[path] | more)
    assert response.status_code == 200, response.text
    body = response.json()
    assert text_of(path, body) == "one two"
    notices = body["outrider"]["notices"]
    assert len(notices) == bool(notice) and all(notice in line for line in notices)


def test_a_tool_of_another_kind_cannot_be_demanded(served: Serving) -> None:
    refused = served.post(CHAT, **LEAST[CHAT], tools=[SEARCH], tool_choice="required")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_minus_one_is_no_limit_but_the_servers() -> None:
    """Neither OpenAI's 16 tokens nor the server's default apply to who asks for no limit."""
    text = "Say [[a text of more than sixteen tokens, and of more than twenty.]]|"
    for most in (None, 30):
        with serving(settings=ServeSettings(default_max_tokens=20, max_tokens=most)) as running:
            for path, name in ((TEXT, "max_tokens"), (LLAMA, "n_predict"), (GENERATE, "options")):
                value = {"num_predict": -1} if name == "options" else -1
                body = running.post(path, **LEAST[path] | {"prompt": text, name: value}).json()
                assert len(text_of(path, body)) == (most or len(text) - len("Say [[]]|"))


def test_a_user_says_something(served: Serving) -> None:
    for path, field in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        refused = served.post(path, **LEAST[path] | {field: [{"role": "user", "content": None}]})
        assert refused.status_code == 400 and "is empty" in refused.json()["error"]["message"]


def test_reasoning_in_several_items_is_joined(served: Serving) -> None:
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "ab"]
    both = served.post(RESPONSES, input=[*items, *LEAST[CHAT]["messages"]]).json()
    one = served.post(RESPONSES, input=[*items[1:], *LEAST[CHAT]["messages"]]).json()
    assert text_of(RESPONSES, both) == text_of(RESPONSES, one) == "one two"
