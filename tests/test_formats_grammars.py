"""What answers may be when tools have to be called, or may be."""

import pytest

from formats_samples import (
    TOOLS,
    VOCABULARY,
    WEATHER,
    chat_format,
    template,
    vocabulary_with,
)
from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.errors import GrammarError
from outrider.core.params import FastForward
from outrider.formats import Named, ToolChoice, ToolSpec, format_of

COMPILER = Compiler(VOCABULARY)
END = VOCABULARY.size - 1
WEATHER_CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Ulm"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Ulm"}}]',
    "named": '[TOOL_CALLS]get_weather[ARGS]{"city": "Ulm"}',
    "json": '{"name": "get_weather", "arguments": {"city": "Ulm"}}',
}
NOTE_CALLS = {
    name: text.replace("get_weather", "get").replace('"city": "Ulm"', '"text": "a}b"')
    for name, text in WEATHER_CALLS.items()
}
TWO_CALLS = {
    "hermes": WEATHER_CALLS["hermes"] + "\n" + NOTE_CALLS["hermes"],
    "llama3": WEATHER_CALLS["llama3"] + "; " + NOTE_CALLS["llama3"],
    "mistral": WEATHER_CALLS["mistral"][:-1] + ", " + NOTE_CALLS["mistral"].removeprefix("[TOOL_CALLS]["),
    "named": WEATHER_CALLS["named"] + NOTE_CALLS["named"],
    "json": WEATHER_CALLS["json"] + "\n" + NOTE_CALLS["json"],
}
FORMATS = list(WEATHER_CALLS)


def start(
    name: str,
    choice: ToolChoice,
    *,
    parallel: bool = True,
    prompt: str = "",
    fast_forward: FastForward = "exact",
    tools: list[ToolSpec] = TOOLS,
) -> GrammarConstraint:
    grammar = chat_format(name).grammar(
        tools, choice, parallel=parallel, prompt=prompt, fast_forward=fast_forward
    )
    assert grammar is not None
    return COMPILER.compile(grammar).start()


def tokens_of(text: str) -> list[int]:
    return VOCABULARY.tokenize(text, add_special=False, parse_special=True)


def spelled(tokens: list[int]) -> str:
    """As a reader sees it."""
    return b"".join(map(VOCABULARY.spelling, tokens)).decode(errors="replace")


def takes(constraint: GrammarConstraint, text: str) -> bool:
    """Whether a text may be written, and be the whole of it."""
    tokens = tokens_of(text)
    return constraint.permits((), [*tokens, END]) == len(tokens) + 1


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_one_where_calls_are_not_parallel(name: str) -> None:
    for choice in ("required", "auto"):
        assert takes(start(name, choice, parallel=False), NOTE_CALLS[name])
        constraint = start(name, choice, parallel=False)
        constraint.accept(tokens_of(NOTE_CALLS[name]))
        assert constraint.is_complete
        assert not takes(start(name, choice, parallel=False), TWO_CALLS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_forced_up_to_its_arguments(name: str) -> None:
    constraint = start(name, Named("get"), prompt="[/THINK]")
    if name == "mistral":  # a blank may follow the marker
        constraint.accept([*constraint.forced(())])
        constraint.accept(tokens_of("["))
    head = NOTE_CALLS[name].partition('"a}b"')[0].removeprefix("[TOOL_CALLS][")
    forced = spelled(list(constraint.forced(())))
    assert forced and head.startswith(forced) and len(head) - len(forced) <= 1
    assert start(name, Named("get"), fast_forward="off").forced(()) == ()


def test_a_call_without_markers_is_held_to_its_schema_where_markers_are_usual() -> None:
    call = WEATHER_CALLS["json"]
    assert takes(start("hermes", "auto"), f"So:\n{call}\n{NOTE_CALLS['json']}")
    assert not takes(start("hermes", "auto"), call.replace("Ulm", "Rom"))
    assert not takes(start("hermes", "required"), call)
    typed = WEATHER_CALLS["llama3"].replace("{", '{"type": "function", ', 1)
    assert takes(start("llama3", "auto"), typed)
    assert not takes(start("llama3", "auto"), typed.replace("Ulm", "Rom"))


@pytest.mark.parametrize("marker", ["<think>", "[THINK]"])
def test_reasoning_may_come_first_where_the_template_knows_it(marker: str) -> None:
    name = "named" if marker == "[THINK]" else "thinking"
    call, closer = WEATHER_CALLS["named" if name == "named" else "hermes"], f"{marker[0]}/{marker[1:]}"
    thought = 'so: {"name": "get"} <tool_call>{\n'
    for choice in ("required", "auto"):
        assert takes(start(name, choice), call)
        assert takes(start(name, choice), f"{marker}{thought}{closer}\n\n{call}")
        assert not takes(start(name, choice), f"{marker}so{closer}\n\n{call}!")
        # Behind an opened reasoning the marker has been written already.
        assert takes(start(name, choice, prompt=f"…{marker}\n"), f"so{closer}{call}")
        assert not takes(start(name, choice, prompt=f"…{marker}\n"), f"so{closer}{call}!")
    assert takes(start(name, "auto"), f"{marker}so{closer}Hi")
    assert not takes(start(name, "required"), f"{marker}so{closer}Hi")
    assert not takes(start(name, "required", prompt=f"{marker}"), call)
    # Where the prompt says that there is none, the call is forced from its first character.
    over = start(name, Named("get"), prompt=f"{marker}\n\n{closer}\n\n")
    assert len(over.forced(())) > 5
    assert not takes(start("hermes", "required"), f"{marker}so{closer}{call}")


def test_markers_may_be_control_tokens_or_text() -> None:
    vocabulary = vocabulary_with("<tool_call>", "</tool_call>", "<end>")
    hermes = format_of(template("hermes"), vocabulary)
    assert hermes.visible == (vocabulary.size - 3, vocabulary.size - 2)
    compiler = Compiler(vocabulary)
    for choice in ("required", "auto"):
        grammar = hermes.grammar(TOOLS, choice, parallel=True)
        assert grammar is not None
        tokens = vocabulary.tokenize(TWO_CALLS["hermes"], add_special=False, parse_special=True)
        assert compiler.compile(grammar).start().permits((), tokens) == len(tokens)
    spelled_out = format_of(template("named"), vocabulary_with("<end>"))
    assert spelled_out.visible == ()
    grammar = spelled_out.grammar(TOOLS, "auto", parallel=True)
    assert grammar is not None
    constraint = Compiler(vocabulary_with("<end>")).compile(grammar).start()
    assert constraint.permits((), list(TWO_CALLS["named"].encode())) == len(TWO_CALLS["named"])


def test_schemas_are_enforced_as_far_as_they_can_be() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    lenient, strict = ToolSpec("f", parameters=odd), ToolSpec("f", parameters=odd, strict=True)
    format_ = chat_format("hermes")
    assert [n for n in format_.notices([lenient, WEATHER])] == [
        "tool f: schema: #/properties/a/uniqueItems cannot be enforced, and is left out"
    ]
    assert takes(start("json", "required", tools=[lenient]), '{"name": "f", "arguments": {"a": [1, 1]}}')
    with pytest.raises(GrammarError, match=r"tool f: schema #/properties/a/uniqueItems .*strict"):
        format_.grammar([strict], "auto", parallel=True)


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/nowhere"}, {"type": "string"}, {"properties": {"a": {"type": "colour"}}}]
)
def test_arguments_of_a_broken_schema_are_any_object(schema: dict[str, object]) -> None:
    tool = ToolSpec("f", parameters=schema)
    (notice,) = chat_format("json").notices([tool])
    assert notice.startswith("tool f: schema #/") and notice.endswith("its arguments may be any object")
    assert takes(start("json", "required", tools=[tool]), '{"name": "f", "arguments": {"any": [1, {}]}}')
    assert not takes(start("json", "required", tools=[tool]), '{"name": "f", "arguments": "x"}')
    with pytest.raises(GrammarError, match="tool f"):
        chat_format("json").notices([ToolSpec("f", parameters=schema, strict=True)])


def test_objects_have_no_properties_that_no_one_named_but_where_schemas_are_combined() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    tool = ToolSpec("f", parameters={"properties": {"a": inner}})
    call = '{"name": "f", "arguments": {"a": {%s}}}'
    assert takes(start("json", "required", tools=[tool]), call % '"properties": 1')
    assert not takes(start("json", "required", tools=[tool]), call % '"b": 1')
    open_ = ToolSpec("f", parameters={"properties": {"a": {**inner, "additionalProperties": True}}})
    assert takes(start("json", "required", tools=[open_]), call % '"b": 1')
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    both = {"allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]}
    schema = {"properties": {"a": both}, "$defs": {"one": inner, "other": other}}
    combined = ToolSpec("f", parameters=schema)
    assert takes(start("json", "required", tools=[combined]), call % '"properties": 1, "b": 1')
    anything = ToolSpec("f")
    assert takes(start("json", "required", tools=[anything]), call % "")


def test_no_tools_need_no_grammar() -> None:
    format_ = chat_format("hermes")
    assert format_.grammar(TOOLS, "none", parallel=True) is None
    assert format_.grammar([], "auto", parallel=True) is None
