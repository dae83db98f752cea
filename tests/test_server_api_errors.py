"""What is taken, and what is refused: a refusal has OpenAI's shape, names the field and says the way out."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Response

from outrider.server.settings import ServeSettings
from serving import (
    CHAT,
    GENERATE,
    HERMES,
    LLAMA,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SCHEMA,
    TEXT,
    Serving,
    events,
    serving,
    text_of,
    user,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
OTHER_TOOL = {"type": "function", "function": {"name": "x"}}
UNENFORCED = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}
NESTED = b'{"not":' * 300 + b"1" + b"}" * 300
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
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def said_in(part: dict[str, Any]) -> dict[str, Any]:
    """A user's message of one part."""
    return {"role": "user", "content": [part]}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(template=HERMES, context_tokens=8192) as running:
        yield running


def refusal(response: Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert response.json().keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    return error


def refused(served: Serving, path: str, **body: Any) -> dict[str, Any]:
    return refusal(served.post(path, **(LEAST[path] | body)))


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"temprature": 0.5}, "temprature"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"speculation": {"polcy": "auto"}}, "speculation.polcy"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_an_unknown_field_is_named(served: Serving, path: str, body: dict[str, Any], param: str) -> None:
    error = refused(served, path, **body)
    assert (error["param"], error["code"]) == (param, "unknown_field")
    assert error["message"].startswith(f"unknown field: {param}.")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"n_predict": 5, "max_tokens": 6}, "n_predict"),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        (CHAT, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (RESPONSES, {"input": [{"role": "user", "content": None}]}, "input[0].content"),
        (TEXT, {"suffix": "end"}, "suffix"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(served: Serving, path: str, body: dict[str, Any], param: str) -> None:
    error = refused(served, path, **body)
    assert (error["param"], error["code"]) == (param, "unsupported")
    assert error["message"].startswith(param)
    assert len(error["message"].split(". ")) >= 2, "no way out"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"modalities": ["text", "audio"]}, "modalities[1]"),
        (CHAT, {"mirostat": 2}, "mirostat"),
        (CHAT, {"messages": [said_in({"type": "image_url"})]}, "messages[0].content[0].type"),
        (RESPONSES, {"input": [said_in({"type": "input_image"})]}, "input[0].content[0].type"),
        (RESPONSES, {"background": True}, "background"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"prompt": ["x"] * 129}, "prompt"),
        (CHAT, {"temperature": "0.5"}, "temperature"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"top_p": 1.5}, "top_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 1.5}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": -2}, "max_tokens"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a", ""]}, "stop[1]"),
        (CHAT, {"stop": ["x"] * 33}, "stop"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias.a"),
        (CHAT, {"logit_bias": {"5": 101}}, "logit_bias.5"),
        (CHAT, {"logit_bias": {"300": 1}}, "logit_bias"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools"),
        (CHAT, {"tools": [TOOL], "tool_choice": OTHER_TOOL}, "tool_choice"),
        (CHAT, {"response_format": NAMED, "grammar": 'root ::= "a"'}, "grammar"),
        (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        (CHAT, {"response_format": NAMED, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {"speculation": {"policy": "model"}}, "speculation.policy"),
        (CHAT, {"speculation": {"policy": "magic"}}, "speculation.policy"),
        (CHAT, {"speculation": {"max_draft": 65}}, "speculation.max_draft"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (TEXT, {"prompt": [1, "a"]}, "prompt[1]"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_named(
    served: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    error = refused(served, path, **body)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"response_format": UNENFORCED}, "response_format", '"strict": false'),
        ({"json_schema": {"type": 5}}, "json_schema", "type"),
        ({"grammar": "root ::= ("}, "grammar", "line 1"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "choose"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ],
)  # fmt: skip
def test_a_broken_grammar_is_refused_before_anything_runs(
    served: Serving, body: dict[str, Any], param: str, said: str
) -> None:
    calls = len(served.model.calls)
    error = refused(served, CHAT, **body)
    assert (error["param"], error["code"]) == (param, "invalid_grammar")
    assert said in error["message"]
    assert len(served.model.calls) == calls


def test_what_would_be_taken_is_said(served: Serving) -> None:
    said: dict[str, tuple[Any, str]] = {
        "max_tokens": (0, "max_tokens: it has to be -1 or 1 or more."),
        "modalities": (["audio"], 'modalities[0]: it has to be "text".'),
        "temperature": ("hot", "temperature: it has to be a number."),
        "top_p": (1.5, "top_p: it has to be 1 or less."),
        "stop": (5, "stop: it has to be text or an array."),
        "messages": ([5], "messages[0]: it has to be an object."),
        "seed": ("y" * 100, "seed: it has to be a whole number."),
    }
    for field, (value, message) in said.items():
        assert refused(served, CHAT, **{field: value})["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"null",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1, "messages": []}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1' + b"0" * 5_000 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1' + b"0" * 100 + b"}",
        b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": '
        b'{"name": "f", "description": "\\ud800"}}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "json_schema": {"const": "\\ud800"}}',
        b'{"messages": [{"role": "user", "content": "hi"}], "json_schema": ' + NESTED + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(served: Serving, body: bytes) -> None:
    response = served.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    refusal(response)


def test_a_body_without_a_type_is_read_as_json(served: Serving) -> None:
    for body, status in ((b'{"prompt": "hi", "max_tokens": 2}', 200), (b"prompt=hi", 400)):
        assert served.client.post(TEXT, content=body).status_code == status


def test_a_queue_that_is_full_takes_no_choice_at_all() -> None:
    endless = {"messages": user(f"[[{'x' * 1500}]]"), "n": 2}
    with serving(max_running=1, max_waiting=0, call_s=0.01, drafters=[], context_tokens=4096) as served:
        error = refusal(served.post(CHAT, **endless), 429)
        assert served.idle(5)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert len(served.model.calls) < 100


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/detokenize"])
def test_another_model_is_not_here(served: Serving, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = LEAST | {
        "/tokenize": {"content": "hi"},
        "/detokenize": {"tokens": [1]},
    }
    error = refusal(served.post(path, **bodies[path], model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


def test_a_prompt_that_is_too_long_is_told_apart() -> None:
    with serving(context_tokens=32) as served:
        error = refusal(served.post(CHAT, messages=user("x" * 40)))
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 32 tokens" in error["message"]
        assert refusal(served.post(TEXT, prompt="x" * 32))["param"] == "prompt"
        assert refusal(served.post(RESPONSES, input="x" * 40))["param"] == "input"


def test_a_schema_that_is_too_large_is_refused(served: Serving) -> None:
    large = {"type": "object", "description": "x" * 2**18}
    for body in (
        {"json_schema": large},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": large}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": large}}]},
    ):
        assert refused(served, CHAT, **body)["code"] == "grammar_too_large"


def test_a_template_that_refuses_is_quoted() -> None:
    with serving(template="{{ raise_exception('roles must alternate') }}") as served:
        error = refusal(served.post(CHAT, messages=user("hi")))
        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]


def test_a_failing_engine_is_an_error_of_the_server() -> None:
    with serving() as broken:
        broken.model.fail_from_call = 3
        error = refusal(broken.post(CHAT, messages=user("Say [[abcdef]]")), 500)
        assert (error["type"], error["code"]) == ("server_error", "backend_error")
        broken.model.fail_from_call = None
        answer = broken.post(CHAT, messages=user("Say [[abc]]")).json()
        assert answer["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA])
def test_an_error_in_a_stream_is_an_event_and_its_end(path: str) -> None:
    with serving() as broken:
        broken.model.fail_from_call = 2
        response = broken.post(path, **LEAST[path] | {"stream": True})
        assert "[DONE]" not in response.text and broken.idle()
    last = json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))
    if path == RESPONSES:
        assert (last["type"], last["code"]) == ("error", "backend_error")
        assert last["sequence_number"] == len(events(response)) - 1
    elif path == MESSAGES:
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    elif path == OLLAMA:
        assert list(last) == ["error"] and "failed" in last["error"]
    else:
        assert last["error"]["code"] == "backend_error"


def test_an_answer_that_cannot_go_on_is_an_error(served: Serving) -> None:
    # No token of the vocabulary spells what the grammar asks for.
    error = refused(served, CHAT, logit_bias={str(ord("b")): -100}, grammar='root ::= "ab"')
    assert error["code"] == "constraint_failed"


def test_paths_and_methods_that_are_not_there(served: Serving) -> None:
    client = served.client
    assert refusal(client.get("/v2/chat"), 404)["code"] == "not_found"
    assert refusal(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    response = client.get(CHAT)
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


# What benchmarks and clients send beside the text: taken, and said where it has no effect

NO_EFFECT: dict[str, Any] = {
    "id_slot": -1,
    "n_keep": 4,
    "timings_per_token": True,
    "keep_alive": "5m",
    "store": True,
    "service_tier": "flex",
    "prompt_cache_options": {},
    "user": "me",
    "skip_special_tokens": True,
}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
LOOK = {"name": "look", "parameters": {"type": "object"}}
NULL = [*user("Hi"), {"role": "assistant", "content": None}, *user("Say [[one two]]")]


def said_by(part: str) -> list[dict[str, Any]]:
    """A message with an id, and a part that is to be cached."""
    return [{"id": "m1", "role": "user", "content": [{"type": part, "text": "Say [[one two]]"} | CACHED]}]


@pytest.mark.parametrize(
    ("path", "more", "notice"),
    [
        *((path, NO_EFFECT, "") for path in (CHAT, TEXT)),
        (CHAT, {"n_predict": 50}, ""),
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


def test_minus_one_is_no_limit_but_the_servers() -> None:
    """Neither OpenAI's 16 tokens nor the server's default apply to who asks for no limit."""
    text = "Say [[a text of more than sixteen tokens, and of more than twenty.]]|"
    for most in (None, 30):
        with serving(settings=ServeSettings(default_max_tokens=20, max_tokens=most)) as running:
            for path, name in ((TEXT, "max_tokens"), (LLAMA, "n_predict"), (GENERATE, "options")):
                value = {"num_predict": -1} if name == "options" else -1
                body = running.post(path, **LEAST[path] | {"prompt": text, name: value}).json()
                assert len(text_of(path, body)) == (most or len(text) - len("Say [[]]|"))
