"""Answers told apart into text, reasoning and calls, as they come in."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats_samples import TOOLS, Read, chat_format, merged, read
from outrider.core.data import Character
from outrider.formats import ToolSpec

OBJECT = '{"name": "get_weather", "arguments": {"city": "Ulm"}}'
CALL = ("get_weather", '{"city": "Ulm"}')


LLAMA = OBJECT.replace("arguments", "parameters")


def hermes(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", hermes(OBJECT)),
        ("hermes", f"<tool_call>{OBJECT}</tool_call>"),
        ("hermes", f"\n {hermes(OBJECT)}\n"),
        ("hermes", OBJECT),
        ("llama3", LLAMA),
        ("llama3", f"<|python_tag|>{LLAMA}"),
        ("llama3", LLAMA.replace('"name"', '"type": "function", "name"')),
        ("mistral", f"[TOOL_CALLS][{OBJECT}]"),
        ("named", '[TOOL_CALLS]get_weather[ARGS]{"city": "Ulm"}'),
        ("json", OBJECT),
        ("json", f"  {OBJECT}\n\n"),
        ("json", OBJECT.replace(": ", " :\n", 1)),
    ],
)
def test_a_call_is_read_and_leaves_no_content(name: str, text: str) -> None:
    found = read(name, text)
    assert found.calls == [CALL] and not found.content


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"a":{"name":"x","arguments":{"name":1}}}',
        '{"a": "}{][\\" </tool_call> <tool_call>\\\\"}',
        '{"a": "\\u00e9\\ud83d\\ude00\\n", "b": [1.5e-3, null, true]}',
        '{ "a" :\n[ ] }',
        '{"code": "def f():\n\treturn 1"}',
    ],
)
def test_arguments_come_out_as_they_were_written(arguments: str) -> None:
    for name, text in (
        ("hermes", hermes(f'{{"name": "f", "arguments": {arguments}}}')),
        ("llama3", f'{{"name": "get", "parameters": {arguments}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {arguments}}}]'),
        ("named", f"[TOOL_CALLS]f[ARGS]{arguments}"),
    ):
        found = read(name, *text)
        assert [call[1] for call in found.calls] == [arguments] and not found.content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<<tool_call <tool_call"),
        ("hermes", "a\n</tool_call>"),
        ("llama3", '{"name": "Ada", "parameters": {}}'),
        ("llama3", 'See {"name": "get", "parameters": {}}'),
        ("mistral", OBJECT),
        ("json", '{"city": "Ulm"}\n{"na": 1}\n{"name"'),
        ("json", "  \n\n "),
    ],
)
def test_what_is_no_call_comes_out_as_it_is(name: str, text: str) -> None:
    found = read(name, text)
    assert found.content == text and not found.calls
    assert Read(chat_format(name).reader(TOOLS), *text).content == text


def test_a_call_that_breaks_off_keeps_what_was_streamed() -> None:
    text = hermes(OBJECT)
    first = text.index('{"city"') + 1
    for length in range(first, len(text)):
        found = read("hermes", text[:length])
        assert found.calls == [("get_weather", '{"city": "Ulm"}'[: length - first + 1])] and not found.content


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", "<tool_call>", []),
        ("hermes", '<tool_call>\n{"name": "get_wea', []),
        ("hermes", '{"name": "get_wea', []),
        ("hermes", '<tool_call>\n{"name": "get_weather"', [("get_weather", "")]),
        ("hermes", f"{hermes(OBJECT)}\n<tool", [CALL]),
        ("hermes", f'{hermes(OBJECT)}\n<tool_call>\n{{"name": "get", "arg', [CALL, ("get", "")]),
        ("mistral", "[TOOL_CALLS]", []),
        ("named", "[TOOL_CALLS]get_weath", []),
        ("mistral", f"[TOOL_CALLS][{OBJECT}, ", [CALL]),
        ("json", '{"name": "get_weat', []),
        ("json", f'{OBJECT}\n{{"na', [CALL]),
        ("llama3", f"{LLAMA}; ", [CALL]),
    ],
)
def test_what_is_cut_of_a_call_is_no_content(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    found = read(name, text)
    assert (found.calls, found.content) == (calls, "")


def test_what_must_be_a_call_is_one_from_its_first_character() -> None:
    for name, text in [("json", '{"na'), ("hermes", "<tool_c"), ("mistral", "[TOO")]:
        assert read(name, text).content == text
        assert read(name, text, must_call=True).content == ""
        thought = read(name, f"so</think>\n{text}", must_call=True, prompt="<think>")
        assert (thought.reasoning, thought.content) == ("so", "")
    assert read("json", "so </th", must_call=True, prompt="<think>").reasoning == "so </th"


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("so</think>a b </think> c </think>", "so", "a b c </think>"),
        ("so</think> </think>\na", "so", "a"),
        ("so</think> <think>and</think>\na <think>b", "soand", "a <think>b"),
        ("so</think>a <thi </thin </think>", "so", "a <thi </thin "),
    ],
)
def test_reasoning_may_end_again_after_an_end_that_was_forced(
    text: str, reasoning: str, content: str, tools: list[ToolSpec]
) -> None:
    reader = chat_format("hermes").reader(tools, prompt="<think>")
    reader.is_forced = True
    found = Read(reader, *text)
    assert (found.reasoning, found.content.rstrip()) == (reasoning, content.rstrip())
    calls = chat_format("hermes").reader(TOOLS, prompt="<think>")
    calls.is_forced = True
    assert Read(calls, f"so</think>{hermes(OBJECT)}").calls == [CALL]
    as_ever = text.removeprefix("so</think>").lstrip()
    assert read("hermes", text, prompt="<think>").content.rstrip() == as_ever.rstrip()


Shown = list[tuple[str, int, str]]


def pushing(name: str) -> tuple[Callable[[str], Shown], Callable[[], Shown]]:
    """What gives a format's reader more text, and what ends it."""
    reader = chat_format(name).reader(TOOLS)
    return lambda text: merged(reader.push(Character(text, (0,)))), lambda: merged(reader.end())


def content(text: str) -> Shown:
    return [("content", -1, text)]


def test_what_is_never_certain_is_given_out_and_takes_little_time() -> None:
    push, end = pushing("llama3")
    assert push("{" + " " * 100_000) == content("{")
    assert push("a") == content(" " * 100_000 + "a") and end() == []


def test_parts_come_as_early_as_they_are_certain() -> None:
    push, end = pushing("hermes")
    assert push("Hi ") == content("Hi")
    assert push("there <too") == content(" there")
    assert push("ls> <tool_call>") == content(" <tools>")
    assert push('\n{"name": "f"') == [("call", 0, "f")] and push(', "arguments": ') == []
    assert push("{") == [("call", 0, "{")]
    assert push('"a": 1') == [("call", 0, '"a": 1')]
    assert push("}}\n") == [("call", 0, "}")]
    assert push("</tool_call>") == [] and push("\n") == [] and end() == []


def test_an_object_that_is_no_call_is_held_no_longer_than_it_may_be_one() -> None:
    push, _ = pushing("json")
    assert push('{"na') == []
    assert push("t") == content('{"nat')
    assert push('"}\n{"name": "get_') == content('"}')
    assert push("x") == content('\n{"name": "get_x')


def test_reasoning_is_told_apart() -> None:
    found = read("thinking", f"<think>\nIf </thi {hermes(OBJECT)}\n</think>\n\nHi <think>")
    assert (
        found.reasoning == f"If </thi {hermes(OBJECT)}" and found.content == "Hi <think>" and not found.calls
    )
    assert read("thinking", f"<think></think>{hermes(OBJECT)}").calls == [CALL]
    assert read("named", "[THINK]so[/THINK]Hi").reasoning == "so"
    assert read("json", "<think>so</think>Hi").reasoning == "so"
    assert read("thinking", "a <think>so</think>").content == "a <think>so</think>"
    assert read("thinking", "\n<thin").content == "\n<thin"


@pytest.mark.parametrize("start", ["", "<think>", "\n<think>\n"])
def test_reasoning_that_the_prompt_opened_is_told_apart(start: str) -> None:
    found = read("thinking", f"{start}so</think>\nHi", prompt="<|assistant|><think>\n")
    assert (found.reasoning, found.content) == ("so", "Hi")
    assert read("thinking", f"{start}so <", prompt="<think>").reasoning == "so <"
    assert read("thinking", "</think>Hi", prompt="<think>").content == "Hi"
    assert read("thinking", "\n<thi", prompt="<think>").reasoning.endswith("<thi")
    assert read("thinking", "<thin</think>Hi", prompt="<think>").reasoning == "<thin"
    assert read("thinking", "so</think>Hi", prompt="<think>\n\n</think>\n\n").content == "so</think>Hi"


BITS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"),
    *("[/THINK]", "\n", " ", "; ", "[", "]", "{", "}", ", ", '"', "\\", "x", "é", "<", "null", "<tool_"),
    *('{"name": ', '"get"', '"get_weather"', ', "arguments": ', '{"a": 1}', '"{\\"a\\": 1}"', OBJECT),
    f"{OBJECT}, ",
]
TEXTS = st.lists(st.sampled_from(BITS), max_size=14).map("".join)
NAMES = st.sampled_from(["hermes", "thinking", "llama3", "mistral", "named", "json"])


@given(TEXTS, NAMES, st.sampled_from(["", "<think>", "[THINK]"]), st.data())
def test_any_split_gives_the_same_parts(text: str, name: str, prompt: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(name, text, prompt=prompt)
    assert merged(read(name, *parts, prompt=prompt).parts) == merged(whole.parts)
    assert merged(read(name, *text, prompt=prompt).parts) == merged(whole.parts)


@given(TEXTS, NAMES)
def test_nothing_is_lost_or_made_up(text: str, name: str) -> None:
    found = read(name, *text)
    assert is_subsequence(found.reasoning, text) and is_subsequence(found.content, text)
    if all(part.kind == "content" for part in found.parts):
        assert found.content == text
    shown = (found.content, found.reasoning, *(name + arguments for name, arguments in found.calls))
    left = sum(map(len, shown))
    envelopes = (
        sum(text.count(c) for c in BITS[:8]) * 16 + len(found.calls) * 40 + sum(map(text.count, " \n;,[]\\"))
    )
    last_shown = max((part.tokens[-1] for part in found.parts if part.text), default=-1)
    cut = len(text) - 1 - last_shown  # of a call that breaks off
    assert len(text) - left <= envelopes + cut


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


@given(TEXTS, NAMES, st.booleans(), st.sampled_from(["", "<think>"]))
def test_every_token_has_a_kind(text: str, name: str, must_call: bool, prompt: str) -> None:
    """A token may be in several parts, but for white space of the content in none."""
    found = read(name, *text, must_call=must_call, prompt=prompt)
    lost = set(range(len(text))) - {place for part in found.parts for place in part.tokens}
    assert not lost, [text[place] for place in lost]


@given(st.text(max_size=60), NAMES)
def test_plain_text_is_content(text: str, name: str) -> None:
    assert read(name, text).content == text
