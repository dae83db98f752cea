"""Which format a template speaks, and conversations with tools in the form that it expects."""

import json
from typing import Any

import pytest

from formats_samples import (
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN,
    TEXT_ARGUMENTS,
    TOOLS,
    VOCABULARY,
    WEATHER,
    chat_format,
    template,
)
from outrider.core.errors import PromptError
from outrider.formats import ToolChoice, format_of

ARGUMENTS_FIRST = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    '{"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}',
)
USER = {"role": "user", "content": "How is it in Ulm?"}


def asked(*names: str, arguments: str = '{"city": "Ulm"}', content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def said(i: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{i}", "content": content}


def rendered(name: str, messages: list[dict[str, Any]], choice: ToolChoice = "auto", **extra: Any) -> str:
    ready, tools = chat_format(name).conversation(messages, TOOLS, choice, **extra)
    return template(name).render(ready, tools=tools)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3"),
        (PLAIN, "json"),
        (HERMES.replace("<tool_call>\n", "<tool_call>\n<function=x>"), "json"),
        (HERMES.replace("tool_call>", "call>"), "json"),
        (PLAIN + "{# <tool_call> #}", "json"),
        (LLAMA.replace("<|python_tag|>", ""), "llama3"),
        (MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS] ["), "mistral"),
        (HERMES.replace('{"name": "{{ call.function.name }}", "arguments": ', '{"arguments": '), "json"),
        (ARGUMENTS_FIRST, "hermes"),
    ],
)
def test_the_template_tells_the_format(source: str, name: str) -> None:
    assert format_of(template(source), VOCABULARY).name == name
    assert format_of(None, VOCABULARY).name == "json"


def test_earlier_calls_are_spelled_as_the_model_spelled_them() -> None:
    turns = [USER, asked("get_weather", "get", content="Well."), said(0, "hot"), said(1, "kept")]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert f"Well.{call}" in rendered("hermes", turns)
    assert f"Well.{call}" in rendered(TEXT_ARGUMENTS, turns)
    assert rendered("hermes", turns).endswith("<|tool|>hot<|tool|>kept<|assistant|>")
    assert '[TOOL_CALLS]get_weather[ARGS]{"city": "Ulm"}' in rendered("named", turns)


def test_a_template_that_takes_single_calls_is_given_one_after_the_other() -> None:
    turns = [USER, asked("get_weather", "get", "get", content="So:"), said(1, "kept"), said(0, "hot"), USER]
    parts = rendered("llama3", turns).split("<|start_header_id|>")[2:]
    assert [part.split("<|end_header_id|>")[0] for part in parts] == [
        *("assistant", "tool", "assistant", "tool", "assistant", "user", "assistant")
    ]
    assert '"get"' in parts[0] and "kept" in parts[1] and "get_weather" in parts[2] and "hot" in parts[3]


def test_mistrals_ids_have_nine_characters_and_belong_together() -> None:
    messages, _ = chat_format("mistral").conversation([USER, asked("get"), said(0, "kept")], TOOLS)
    (call,) = messages[1]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum() and messages[2]["tool_call_id"] == call["id"]
    assert f'"id": "{call["id"]}"' in rendered("mistral", [USER, asked("get"), said(0, "kept")])
    kept = asked("get") | {"tool_calls": [asked("get")["tool_calls"][0] | {"id": "abcDEF123"}]}
    assert (
        chat_format("mistral").conversation([USER, kept], TOOLS)[0][1]["tool_calls"][0]["id"] == "abcDEF123"
    )


def test_results_carry_the_name_of_the_tool() -> None:
    messages, _ = chat_format("hermes").conversation([USER, asked("get"), said(0, "a"), said(7, "b")], TOOLS)
    assert messages[2]["name"] == "get" and "name" not in messages[3]


def test_a_template_without_tools_has_them_described() -> None:
    system = {"role": "developer", "content": "Be brief."}
    turns = [system, USER, asked("get_weather", "get"), said(0, "hot"), said(1, "kept"), USER]
    messages, tools = chat_format("json").conversation(turns, TOOLS)
    assert tools is None and [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\n") and "several calls" in messages[0]["content"]
    assert json.dumps(WEATHER.parameters, ensure_ascii=False) in messages[0]["content"]
    lines = messages[2]["content"].splitlines()
    assert json.loads(lines[0]) == {"name": "get_weather", "arguments": {"city": "Ulm"}}
    assert messages[3]["content"] == (
        f"Result of get_weather: hot\n\nResult of get: kept\n\n{USER['content']}"
    )
    assert "several calls" not in rendered("json", [USER], parallel=False)
    assert rendered("json", [USER]).startswith("<|system|>")
    # A conversation without results is left as it is, also where a role comes twice.
    assert chat_format("json").conversation([USER, USER], [])[0] == [USER, USER]


def test_contents_are_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert chat_format("hermes").conversation([parts], [])[0][0]["content"] == "a\nb"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(PromptError, match=r"messages\[1\].content: it holds something that is not text"):
        chat_format("hermes").conversation([USER, image], [])


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "NaN", "7"])
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    with pytest.raises(PromptError, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        chat_format("hermes").conversation([USER, asked("get", arguments=arguments)], TOOLS)
    messages, _ = chat_format("hermes").conversation([USER, asked("get", arguments="")], TOOLS)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_calls_without_a_name_are_refused() -> None:
    broken = {"role": "assistant", "tool_calls": [{"id": "1", "function": {}}]}
    with pytest.raises(PromptError, match="names no function"):
        chat_format("hermes").conversation([USER, broken], TOOLS)


def test_what_is_given_stays_as_it_was() -> None:
    turns = [USER, asked("get_weather", "get"), said(0, "hot"), said(1, "kept"), USER]
    before = json.dumps(turns)
    for name in ("hermes", "llama3", "mistral", "json"):
        chat_format(name).conversation(turns, TOOLS)
    assert json.dumps(turns) == before
