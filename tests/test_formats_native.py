"""The syntaxes that models call tools in, each with a template: found, demanded, written and read back."""

import json
import random
from typing import Any

import jsonschema
import pytest

from formats_samples import CONTROLS as MARKERS
from formats_samples import PLAIN, TOOLS, WEATHER, Read, template, vocabulary_with
from formats_samples import TEMPLATES as KNOWN
from grammars import walk
from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.notices import collect_notices
from outrider.formats import ChatFormat, Named, ToolChoice, ToolSpec, format_of
from outrider.formats.grammar import Call

_HEAD = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
)
_TAIL = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def written(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """A template that writes calls so."""
    parted = f"{{% if not loop.first %}}{between}{{% endif %}}" if between else ""
    calls = f"{before}{{% for c in m.tool_calls %}}{parted}{call}{{% endfor %}}{after}"
    return f"{_HEAD}{{% if m.tool_calls %}}{calls}{{% endif %}}{_TAIL}"


NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_TEXT = "{{ v if v is string else v | tojson }}"


def tagged(one: str) -> str:
    return "{% for k, v in c.function.arguments.items() %}" + one.replace("VALUE", _TEXT) + "{% endfor %}"


_ITEM = '{"name": "' + NAME + '", "arguments": ' + JSON + "}"
_XML = tagged("<parameter={{ k }}>\nVALUE\n</parameter>\n")
TEMPLATES = {
    "qwen3-coder": written(f"<tool_call>\n<function={NAME}>\n{_XML}</function>\n</tool_call>", between="\n"),
    "seed-oss": written(
        f"<seed:tool_call>\n<function={NAME}>\n{tagged('<parameter={{ k }}>VALUE</parameter>' + chr(10))}"
        "</function>\n</seed:tool_call>",
        between="\n",
    ),
    "minimax-m2": written(
        f'<invoke name="{NAME}">\n' + tagged('<parameter name="{{ k }}">VALUE</parameter>\n') + "</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "minicpm5": written(
        f'<function name="{NAME}">' + tagged('<param name="{{ k }}">VALUE</param>') + "</function>",
        between="\n",
    ),
    "glm-4.6": written(
        f"<tool_call>{NAME}\n"
        + tagged("<arg_key>{{ k }}</arg_key>\n<arg_value>VALUE</arg_value>\n")
        + "</tool_call>",
        between="\n",
    ),
    "glm-4.7": written(
        f"<tool_call>{NAME}{tagged('<arg_key>{{ k }}</arg_key><arg_value>VALUE</arg_value>')}</tool_call>"
    ),
    "deepseek-v3.1": written(
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-r1": written(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "kimi-k2": written(
        "<|tool_call_begin|>functions."
        + NAME
        + ":{{ loop.index0 }}<|tool_call_argument_begin|>"
        + JSON
        + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "functionary": written(f"<function={NAME}>{JSON}</function>"),
    "command-r7b": written(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": ' + JSON + "}",
        "<|START_ACTION|>{{ '[\\n    ' }}",
        "{{ '\\n]' }}<|END_ACTION|>",
        "{{ ',\\n    ' }}",
    ),
    "nemotron": written(_ITEM, "<TOOLCALL>[", "]</TOOLCALL>", ", "),
    "apriel": written(_ITEM, "<tool_calls>[", "]</tool_calls>", ", "),
    "minimax-m1": written(_ITEM, "<tool_calls>\n", "{{ '\\n' }}</tool_calls>", "\n"),
    "gigachat": written(f"<|function_call|>{_ITEM}"),
    "granite-3": f"{{# calls follow <|tool_call|> #}}{_HEAD}{_TAIL}",
    "harmony": (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}<|start|>assistant to=functions."
        + f"{NAME}<|channel|>commentary json<|message|>{JSON}<|call|>"
        + "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
TEMPLATES |= {name: KNOWN[name] for name in ("hermes", "llama3", "mistral", "json")}
TEMPLATES["mistral-named"] = KNOWN["named"].partition("{#")[0]
TEMPLATES["mistral-id"] = TEMPLATES["mistral-named"].replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")
CONTROLS = {
    "deepseek-v3.1": [
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    ],
    "kimi-k2": [
        f"<|tool_call{name}|>"
        for name in ("s_section_begin", "_begin", "_argument_begin", "_end", "s_section_end")
    ],
    "command-r7b": ["<|START_ACTION|>", "<|END_ACTION|>"],
    "granite-3": ["<|tool_call|>"],
    "glm-4.6": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>", "</tool_call>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"],
}
"""Control tokens of the vocabularies; the markers of all others are spelled as text."""
VOCABULARIES = {name: vocabulary_with(*CONTROLS.get(name, ()), "<end>") for name in TEMPLATES}
FORMATS = {name: format_of(template(source), VOCABULARIES[name]) for name, source in TEMPLATES.items()}
for _name in ("thinking", "named"):  # of templates that know of reasoning
    VOCABULARIES[_name] = vocabulary_with(*MARKERS)
    FORMATS[_name] = format_of(template(_name), VOCABULARIES[_name])
SEARCH = ToolSpec(
    "search-files",
    parameters={
        "$defs": {
            "range": {
                "type": "object",
                "properties": {"from": {"type": "integer"}, "to": {"type": "integer"}},
            }
        },
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "lines": {"$ref": "#/$defs/range"},
            "paths": {"type": "array", "items": {"type": "string"}},
            "mode": {"enum": ["fast", "slow"]},
            "scope": {"type": ["string", "null"]},
            "weight": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        },
        "required": ["query"],
    },
)
OPEN = ToolSpec("set", parameters={"type": "object", "additionalProperties": True})
ALL = [*TOOLS, SEARCH, OPEN]
_TEXTS = [
    "",
    "a",
    "Köln\n",
    " x ",
    '"quoted" \\ <b>',
    "</b>\n\n<c",
    "日本 🙂",
    "null!",
    "{not json",
    "a: 1, b: [",
    "\n",
]


def call_of(rng: random.Random) -> Call:
    """A call of one of the tools."""
    some = {
        "query": rng.choice(_TEXTS),
        "limit": rng.randrange(-5, 10**6),
        "exact": rng.random() < 0.5,
        "lines": {"from": 1, "to": rng.randrange(9)},
        "paths": [rng.choice(_TEXTS) for _ in range(rng.randrange(3))],
        "mode": rng.choice(["fast", "slow"]),
        "scope": rng.choice([None, "src", "a b"]),
        "weight": rng.choice([0.5, 3, "heavy"]),
    }
    kept = {key: value for key, value in some.items() if key == "query" or rng.random() < 0.6}
    return rng.choice(
        [
            Call("search-files", kept),
            Call(
                "get_weather",
                {"city": rng.choice(["Ulm", "Köln"]), **({"days": 3} if rng.random() < 0.5 else {})},
            ),
            Call("get", {"text": rng.choice(["", "ab", "é\n", "</p>"])}),
            Call("set", {"any_key": rng.choice(["text", 5, None, [1, {"a": "b"}]])}),
            Call("set", {}),
        ]
    )


def syntax(name: str) -> Any:
    return FORMATS[name]._syntax


def tokens_of(name: str, text: str) -> list[int]:
    return VOCABULARIES[name].tokenize(text, add_special=False, parse_special=True)


def start(name: str, choice: ToolChoice, tools: list[ToolSpec] = ALL, **more: Any) -> GrammarConstraint:
    grammar = FORMATS[name].grammar(tools, choice, **{"parallel": True} | more)
    assert grammar is not None
    return Compiler(VOCABULARIES[name]).compile(grammar).start()


def takes(name: str, constraint: GrammarConstraint, text: str) -> bool:
    tokens = [*tokens_of(name, text), VOCABULARIES[name].size - 1]
    return constraint.permits((), tokens) == len(tokens)


def notices_of(name: str, tool: ToolSpec) -> list[str]:
    """What a grammar that demands a call says that it does not enforce."""
    with collect_notices() as notices:
        FORMATS[name].grammar([tool], "required", parallel=True)
    return notices


def read(name: str, *texts: str, tools: list[ToolSpec] = ALL) -> Read:
    return Read(FORMATS[name].reader(tools), *texts)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "json"])  # it knows no tools
def test_a_template_is_found_and_writes_calls_as_its_syntax_does(name: str) -> None:
    found = FORMATS[name]
    assert found.name == ("mistral" if name.startswith("mistral") else name)
    assert {VOCABULARIES[name].spelling(t).decode() for t in found.visible} == set(CONTROLS.get(name, ()))
    function = {"name": "search-files", "arguments": '{"query": "é\\nb", "limit": 3}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "probe1234", "function": function}]},
        {"role": "tool", "tool_call_id": "probe1234", "content": "found"},
    ]
    ready, tools = found.conversation(messages, ALL)
    text = template(TEMPLATES[name]).render(ready, tools=tools)
    call = syntax(name).written([Call("search-files", {"query": "é\nb", "limit": 3})])
    if name == "harmony":  # the template names the function with the role
        call = ' to=functions.search-files<|channel|>commentary json<|message|>{"query": "é\\nb", "limit": 3}'
    if name == "mistral":  # the template adds an id
        call = call.removesuffix("}]")
    assert call.replace("é", "\\u00e9") in text.replace("é", "\\u00e9") and "found" in text
    assert tools is not None and '"search-files"' in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_back_from_any_pieces(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        calls = [call_of(rng) for _ in range(1 if name == "harmony" else rng.randrange(1, 4))]
        text = "So:\n" if name not in ("harmony", "gigachat") and rng.random() < 0.3 else ""
        whole = text + syntax(name).written(calls)
        cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(8)))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        found = read(name, *pieces)
        assert [(n, json.loads(a)) for n, a in found.calls] == [(c.name, dict(c.arguments)) for c in calls], (
            whole
        )
        assert found.content.strip() == text.strip()
        streamed = read(name, *whole)
        assert (streamed.calls, streamed.content) == (found.calls, found.content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_grammar_takes_calls_and_nothing_else(name: str) -> None:
    rng = random.Random(name)
    constraint = start(name, "required")
    for _ in range(12):
        one = call_of(rng)
        assert takes(name, start(name, "required"), syntax(name).written([one])), one
    good = syntax(name).written([Call("get_weather", {"city": "Ulm"})])
    assert takes(name, constraint, good)
    for wrong in (
        good.replace("get_weather", "get_water"),
        good.replace("Ulm", "Rom"),
        good[:-1],
        f"x{good}",
        f"{good}x",
        syntax(name).written([Call("get_weather", {"days": 3})]),
        syntax(name).written([Call("get_weather", {"city": "Ulm", "days": True})]),
        syntax(name).written([Call("get", {"text": "longer"})]),
        syntax(name).written([Call("get", {"text": "a", "more": 1})]),
    ):
        assert not takes(name, start(name, "required"), wrong), wrong
    assert not takes(name, start(name, Named("get")), good)
    content = "<|channel|>final<|message|>Hi <there" if name == "harmony" else "Hi <there"
    assert takes(name, start(name, "auto"), content) and takes(name, start(name, "auto"), good)
    if name != "harmony":
        twice = syntax(name).written([Call("get_weather", {"city": "Ulm"}), Call("get", {"text": "a"})])
        assert takes(name, start(name, "required"), twice) and takes(name, start(name, "auto"), twice)
        assert not takes(name, start(name, Named("get_weather")), twice)
        for free in ("", '{"name": "Ada"}', "<tool_", "a [b] {c}\n", '{"city": "Ulm"}'):
            assert takes(name, start(name, "auto"), free)
        assert takes(name, start(name, "auto"), f"Hm.\n{good}") and not takes(
            name, start(name, "auto"), f"{good} So."
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_written_under_the_grammar_is_read_as_calls(name: str) -> None:
    rng = random.Random(name)
    schemas = {tool.name: {**tool.parameters, "additionalProperties": False} for tool in TOOLS}
    for _ in range(4):
        tokens = walk(start(name, "required", TOOLS), rng, most=4000, ends=[VOCABULARIES[name].size - 1])
        text = b"".join(map(VOCABULARIES[name].spelling, tokens)).decode(errors="replace")
        found = read(name, text, tools=TOOLS)
        assert found.calls and (name == "harmony" or not found.content), text
        for called, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), schemas[called])


@pytest.mark.parametrize("name", TEMPLATES)
def test_content_may_be_limited_beside_tools(name: str) -> None:
    limit = Grammar(
        "json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    )
    lead = "<|channel|>final<|message|>" if name == "harmony" else ""
    good = syntax(name).written([Call("get_weather", {"city": "Ulm"})])
    for text, fits in (
        (f'{lead}{{"n": 7}}', True),
        (good, True),
        (f"{lead}seven", False),
        (f'{lead}{{"n": "7"}}', False),
    ):
        assert takes(name, start(name, "auto", content=limit), text) is fits
    assert not takes(name, start(name, "required", content=limit), f'{lead}{{"n": 7}}')


@pytest.mark.parametrize(("name", "number"), [("kimi-k2", ":0<|"), ("command-r7b", '"0"')])
def test_the_number_of_a_call_is_short(name: str, number: str) -> None:
    good = syntax(name).written([Call("set", {})])
    for other, fits in (("12", True), ("1234", False), ("a", False)):
        numbered = good.replace(number, number.replace("0", other))
        assert numbered != good and takes(name, start(name, "required"), numbered) is fits


def test_values_are_typed_by_their_schema() -> None:
    for name in ("qwen3-coder", "glm-4.6"):
        given = {"query": "5", "limit": 5, "scope": None, "weight": 2.5}
        (call,) = read(name, syntax(name).written([Call("search-files", given)])).calls
        assert json.loads(call[1]) == given
        # Of a tool that no schema describes, values are JSON where they can be.
        (call,) = read(name, syntax(name).written([Call("other", {"a": "5", "b": "x"})])).calls
        assert json.loads(call[1]) == {"a": 5, "b": "x"}
    text = "<tool_call><function=get><parameter=text>a</parameter></function></tool_call>"
    assert read("qwen3-coder", text).calls == [("get", '{"text": "a"}')]


def test_what_is_not_enforced_is_said_and_refused_where_it_must_be() -> None:
    schema = {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}}
    (notice,) = notices_of("qwen3-coder", ToolSpec("f", parameters=schema))
    assert notice == "tool f: when: format cannot be enforced where text is written without quotes"
    assert not notices_of("deepseek-r1", ToolSpec("f", parameters=schema))
    with pytest.raises(GrammarError, match="tool f: when: format"):
        start("qwen3-coder", "auto", [ToolSpec("f", parameters=schema, strict=True)])


def test_listed_values_of_several_types_are_enforced_and_other_limits_said() -> None:
    listed = {"anyOf": [{"enum": ["Ulm", "5"]}, {"type": "null"}, {"const": 7}]}
    tool = ToolSpec("f", parameters={"properties": {"a": listed}, "required": ["a"]})
    for name in ("qwen3-coder", "glm-4.7"):
        assert not notices_of(name, tool)
        for value in ("Ulm", None, 7):
            text = syntax(name).written([Call("f", {"a": value})])
            assert takes(name, start(name, "required", [tool]), text)
            assert json.loads(read(name, text, tools=[tool]).calls[0][1]) == {"a": value}
        assert not takes(
            name, start(name, "required", [tool]), syntax(name).written([Call("f", {"a": "Rom"})])
        )
    either = {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "description": "x"}
    (notice,) = notices_of("glm-4.7", ToolSpec("f", parameters={"properties": {"a": either}}))
    assert notice.startswith("tool f: a: maxLength cannot be enforced")


HARMONY_CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"text": "a"}'


def test_channels_are_told_apart() -> None:
    thought = "<|channel|>analysis<|message|>so <it> is<|end|><|start|>assistant"
    found = read("harmony", *f"{thought}<|channel|>final<|message|>Hi <|there")
    assert (found.reasoning, found.content, found.calls) == ("so <it> is", "Hi <|there", [])
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for call in (HARMONY_CALL, ' to=functions.get<|channel|>commentary json<|message|>{"text": "a"}'):
        found = read("harmony", thought + preamble + call)
        assert (found.reasoning, found.content) == ("so <it> is", "I look.")
        assert found.calls == [("get", '{"text": "a"}')]
        assert takes("harmony", start("harmony", "auto"), thought + preamble + call)
        assert takes("harmony", start("harmony", "required"), thought + call)
    for plain in ("Hi there", "t", "to", " <"):
        assert read("harmony", plain).content == plain
    assert read("harmony", "<|channel|>fin").content == ""
    assert read("harmony", HARMONY_CALL, tools=[]).content == '{"text": "a"}'
    assert read("harmony", HARMONY_CALL.partition("{")[0]).calls == [("get", "{}")]


def plain_format(source: str) -> ChatFormat:
    return format_of(template(source), vocabulary_with("<end>"))


def test_a_template_that_lists_no_tools_is_helped_in_its_own_syntax() -> None:
    source = TEMPLATES["deepseek-v3.1"].partition("{% endfor %}")[2]
    found = plain_format(source)
    assert found.name == "deepseek-v3.1"
    messages, tools = found.conversation([{"role": "user", "content": "hi"}], ALL)
    assert tools is None and "<｜tool▁call▁begin｜><function><｜tool▁sep｜>" in messages[0]["content"]
    assert plain_format(PLAIN).name == "json"


def test_a_template_that_cannot_write_calls_is_given_them_as_text() -> None:
    call = {"id": "1", "function": {"name": "get", "arguments": {"text": "a"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages, tools = FORMATS["granite-3"].conversation(turns, ALL)
    assert tools and messages[1]["content"] == '<|tool_call|>[{"name": "get", "arguments": {"text": "a"}}]'
    assert "tool_calls" not in messages[1]


# What else a grammar holds an answer to

NOTE, ULM = Call("get", {"text": "a}b"}), Call("get_weather", {"city": "Ulm"})


def one_call(name: str, call: Call = ULM) -> str:
    written: str = syntax(name).written([call])
    return written


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral-named", "json"])
def test_one_call_is_one_where_calls_are_not_parallel(name: str, choice: ToolChoice) -> None:
    constraint = start(name, choice, parallel=False)
    assert takes(name, constraint, one_call(name, NOTE))
    constraint.accept(tokens_of(name, one_call(name, NOTE)))
    assert constraint.is_complete
    assert not takes(name, start(name, choice, parallel=False), syntax(name).written([NOTE, ULM]))


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral-named", "json"])
def test_a_named_call_is_forced_up_to_its_arguments(name: str) -> None:
    head = one_call(name, NOTE).partition('"a}b"')[0]
    tokens = start(name, Named("get")).forced(())
    forced = b"".join(map(VOCABULARIES[name].spelling, tokens)).decode(errors="replace")
    assert forced and head.startswith(forced) and len(head) - len(forced) <= 1
    assert start(name, Named("get"), fast_forward="off").forced(()) == ()


def test_a_call_without_markers_is_held_to_its_schema_where_markers_are_usual() -> None:
    call = one_call("json")
    assert takes("hermes", start("hermes", "auto"), f"So:\n{call}\n{one_call('json', NOTE)}")
    assert not takes("hermes", start("hermes", "auto"), call.replace("Ulm", "Rom"))
    assert not takes("hermes", start("hermes", "required"), call)
    typed = one_call("llama3").replace("{", '{"type": "function", ', 1)
    assert takes("llama3", start("llama3", "auto"), typed)
    assert not takes("llama3", start("llama3", "auto"), typed.replace("Ulm", "Rom"))


@pytest.mark.parametrize(("name", "marker"), [("thinking", "<think>"), ("named", "[THINK]")])
def test_reasoning_may_come_first_where_the_template_knows_it(name: str, marker: str) -> None:
    def fits(choice: ToolChoice, text: str, prompt: str = "") -> bool:
        return takes(name, start(name, choice, prompt=prompt), text)

    call, closer = one_call(name), f"{marker[0]}/{marker[1:]}"
    thought = 'so: {"name": "get"} <tool_call>{\n'
    for choice in ("required", "auto"):
        assert fits(choice, call)
        assert fits(choice, f"{marker}{thought}{closer}\n\n{call}")
        assert not fits(choice, f"{marker}so{closer}\n\n{call}!")
        # Behind an opened reasoning the marker has been written already.
        assert fits(choice, f"so{closer}{call}", f"…{marker}\n")
        assert not fits(choice, f"so{closer}{call}!", f"…{marker}\n")
    assert fits("auto", f"{marker}so{closer}Hi")
    assert not fits("required", f"{marker}so{closer}Hi")
    assert not fits("required", call, marker)
    # Where the prompt says that there is none, the call is forced from its first character.
    over = start(name, Named("get"), prompt=f"{marker}\n\n{closer}\n\n")
    assert len(over.forced(())) > 5
    assert not takes("hermes", start("hermes", "required"), f"{marker}so{closer}{one_call('hermes')}")


def test_schemas_are_enforced_as_far_as_they_can_be() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    lenient, strict = ToolSpec("f", parameters=odd), ToolSpec("f", parameters=odd, strict=True)
    notice = "tool f: schema: #/properties/a/uniqueItems cannot be enforced, and is left out"
    assert notices_of("hermes", lenient) == [notice] and not notices_of("hermes", WEATHER)
    assert takes("json", start("json", "required", [lenient]), '{"name": "f", "arguments": {"a": [1, 1]}}')
    with pytest.raises(GrammarError, match=r"tool f: schema #/properties/a/uniqueItems .*strict"):
        start("hermes", "auto", [strict])


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/nowhere"}, {"type": "string"}, {"properties": {"a": {"type": "colour"}}}]
)
def test_arguments_of_a_broken_schema_are_any_object(schema: dict[str, object]) -> None:
    tool = ToolSpec("f", parameters=schema)
    (notice,) = notices_of("json", tool)
    assert notice.startswith("tool f: schema #/") and notice.endswith("its arguments may be any object")
    for arguments, fits in (('{"any": [1, {}]}', True), ('"x"', False)):
        text = f'{{"name": "f", "arguments": {arguments}}}'
        assert takes("json", start("json", "required", [tool]), text) is fits
    with pytest.raises(GrammarError, match="tool f"):
        start("json", "required", [ToolSpec("f", parameters=schema, strict=True)])


def test_objects_have_no_properties_that_no_one_named_but_where_schemas_are_combined() -> None:
    def fits(parameters: dict[str, Any], inside: str) -> bool:
        text = f'{{"name": "f", "arguments": {{"a": {{{inside}}}}}}}'
        return takes("json", start("json", "required", [ToolSpec("f", parameters=parameters)]), text)

    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    assert fits({"properties": {"a": inner}}, '"properties": 1')
    assert not fits({"properties": {"a": inner}}, '"b": 1')
    assert fits({"properties": {"a": {**inner, "additionalProperties": True}}}, '"b": 1')
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    both = {"allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/other"}]}
    combined = {"properties": {"a": both}, "$defs": {"one": inner, "other": other}}
    assert fits(combined, '"properties": 1, "b": 1')
    assert fits({}, "")


def test_no_tools_need_no_grammar() -> None:
    assert FORMATS["hermes"].grammar(TOOLS, "none", parallel=True) is None
    assert FORMATS["hermes"].grammar([], "auto", parallel=True) is None
