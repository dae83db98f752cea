"""JSON schemas: what is enforced, what is refused and where, and how JSON is spaced."""

import json
import random
import re
from typing import Any

import pytest

from grammars import COMPILER, start, takes, walk
from outrider.constraints.compiler import Compiled
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import JsonStyle

Json = Any


def compiled(schema: Json, *, lenient: bool = False, style: JsonStyle = "spaced") -> Compiled:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return COMPILER.compile(Grammar("json_schema", text, style, lenient, fast_forward="off"))


def refusal(schema: Json, *, lenient: bool = False) -> str:
    with pytest.raises(GrammarError) as caught:
        compiled(schema, lenient=lenient)
    error = caught.value
    assert error.what == "schema" and error.way_out and "\n" not in str(error)
    return error.why


def deep(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


# Enforced


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [  # test_json_schema_suite has every keyword
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.001, 1, 0.5], [0, 1.01, -1]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀x"], ["a", "abcd"]),
        ({"const": {"a": 'q"\\\n'}}, [{"a": 'q"\\\n'}], [{}, {"a": "q"}]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            [{"a": 1}, {"a": 1, "b": None}],
            [{}, {"b": None}, {"a": 1, "c": 2}, {"a": "1"}, {"b": None, "a": 1}],
        ),
        ({"$defs": {"a/b~": {"type": "null"}}, "$ref": "#/$defs/a~1b~0"}, [None], [1]),
        ({"definitions": {"unused": {"type": "nonsense"}}, "type": "null"}, [None], [1]),
        ({"title": "t", "description": "d", "default": 3, "x-order": 1, "type": "null"}, [None], [1]),
        ({}, [None, [1, {"a": "b"}]], []),
    ],
)
def test_what_fits_may_be_written_and_nothing_else(
    schema: Json, valid: list[Json], invalid: list[Json]
) -> None:
    constraint = compiled(schema).start()
    for document in valid:
        assert takes(constraint, json.dumps(document, ensure_ascii=False)), document
    for document in invalid:
        assert not takes(constraint, json.dumps(document, ensure_ascii=False)), document


def test_any_json_is_a_kind_of_its_own() -> None:
    constraint = start(Grammar("json"))
    for text in ("null", '{"a": [1, -2.5e3, "é\\n"]}', "[]", '"x"'):
        assert takes(constraint, text)
    for text in ("nul", "{'a': 1}", '{"a": 1,}', "01", " 1", "1 "):
        assert not takes(constraint, text)


def test_an_escaped_name_is_no_other_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}, 'q"': {"type": "null"}}}
    constraint = compiled(schema).start()
    for text in ('{"a": null}', '{"q\\"": null}', '{"b": 1}', '{"\\n": 1}', '{"a": null, "x": "\\t"}'):
        assert takes(constraint, text), text
    for text in ('{"a": 1}', '{"\\u0061": 1}', '{"q\\u0022": 1}', '{"x\\u0001": 1}'):
        assert not takes(constraint, text), text


def tool(i: int, *, tagged: bool = True) -> Json:
    return {
        "type": "object",
        "properties": {"name": {"const": f"tool_{i}"}, "arguments": {"type": "object"}},
        "required": ["name", "arguments"] if tagged else ["arguments"],
        "additionalProperties": False,
    }


def test_one_of_many_tools_is_enforced_where_their_names_tell_them_apart() -> None:
    schema = {
        "$defs": {f"t{i}": tool(i) for i in range(128)},
        "oneOf": [{"$ref": f"#/$defs/t{i}"} for i in range(128)],
        "discriminator": {"propertyName": "name"},
    }
    constraint = compiled(schema).start()
    assert takes(constraint, '{"name": "tool_77", "arguments": {}}')
    assert not takes(constraint, '{"name": "tool_128", "arguments": {}}')


# Refused


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type":\n  "null",}', "not JSON .*line 2, column"),
        ('{"minimum": NaN}', "NaN"),
        ("[]", "it is not a schema"),
        ("null", "it is not a schema"),
        ('"x"', "it is not a schema"),
        ("3", "it is not a schema"),
        (False, "nothing fits"),
        ('{"const": "\\ud800"}', "surrogate"),
        ({"type": "strin"}, "#: Invalid type: strin"),
        ({"type": {"a": 1}}, "#: type must be a string"),
        ({"properties": {"a": {"type": ["null", 5]}}}, "#/properties/a: type must be a string"),
        ({"properties": 5}, "#: properties must be an object"),
        ({"properties": {"a": 5}}, "#/properties/a has to be a schema"),
        ({"anyOf": {}}, "#: anyOf must be an array"),
        ({"required": "a"}, "#: Expected array for 'required'"),
        ({"enum": 5}, "#: enum must be an array"),
        ({"items": {"minLength": -1, "type": "string"}}, "#/items: .*minLength"),
        ({"$ref": 5}, r"#/\$ref points to 5, which is not in this schema"),
        ({"items": {"$ref": "#/$defs/x"}}, r"#/items/\$ref points to '#/\$defs/x', which is not in"),
        ({"$ref": "#nowhere"}, "'#nowhere', which is not in this schema"),
        ({"$ref": "http://example.com/a"}, "'http://example.com/a', which is not in this schema"),
        ({"$ref": "other.json#/a"}, "which is not in this schema"),
        ({"$defs": {"a": {"$id": "http://x/a"}}, "$ref": "#/$defs/a"}, r"#/\$defs/a/\$id starts a document"),
        ({"$ref": "#"}, "nothing can match it"),
        (
            {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 1}},
                "required": ["n"],
            },
            "#/properties/n: nothing fits",
        ),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "#: nothing fits"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "# ?: nothing fits .*no integer"),
        ({"enum": []}, "#: nothing fits"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "nothing fits .*'a'"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "nothing fits .*'a'"),
        (
            {"properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"], "type": "object"},
            "nothing",
        ),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "nothing fits"),
        ({"type": "string", "pattern": "^a{1,3}$", "minLength": 5}, "nothing fits"),
        ({"const": 12345678901234567890123}, r"#/const is beyond 2\^53"),
        ('{"enum": [1, 1e400]}', r"#/enum/1 is beyond"),
        ({"const": [1, {"a": 2**60}]}, "#/const/1/a is beyond"),
        ({"enum": ["a", "b\x01"]}, r"#/enum/1 holds the control character U\+0001"),
        ({"minimum": 9007199254740993}, r"#/minimum is beyond 2\^53"),
        (deep(10_000), "more than 100 levels deep"),
        (deep(60), "more than 100 levels deep"),
        ({"enum": [f"v{i}" for i in range(90_000)]}, "too large"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(2001)}}, "2,001 properties"),
        ('{"description": "' + "x" * 1_000_000 + '"}', "1,000,019 characters"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(schema: Json, reason: str) -> None:
    why = refusal(schema)
    assert re.search(reason, why), why
    assert refusal(schema, lenient=True) == why


UNENFORCED = (
    *("if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "$dynamicRef"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a/b~": {"not": {"type": "null"}}}}, "#/properties/a~1b~0/not"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        *(({keyword: {}}, f"#/{keyword}") for keyword in UNENFORCED),
        ({"unevaluatedItems": False}, "#/unevaluatedItems"),
        ({"minimun": 3}, "#/minimun"),
        ({"properties": {"a": {"nullable": True}}}, "#/properties/a/nullable"),
        ({"type": "string", "format": "regex"}, "#/format"),
        ({"type": "integer", "format": "int32"}, "#/format"),
        ({"format": ["date"]}, "#/format"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "#/items/pattern"),
        ({"items": {"type": "string", "pattern": r"\bfoo"}}, "#/items/pattern"),
        (
            {"$defs": {"p": {"type": "string", "pattern": "("}}, "items": {"$ref": "#/$defs/p"}},
            "#/$defs/p/pattern",
        ),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "#/items/oneOf"),
        ({"oneOf": [tool(1, tagged=False), tool(2, tagged=False)]}, "#/oneOf"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "#/maxProperties"),
        ({"items": {"type": "object", "minProperties": 2}}, "#/items/minProperties"),
        ({"patternProperties": {"^a": {}, "^ab": {"type": "null"}}}, "#/patternProperties"),
        ({"type": "number", "multipleOf": 1e-30}, "#/multipleOf"),
        ({"$schema": "http://nowhere.example/x", "type": "null"}, "#/$schema"),
        (
            {
                "$defs": {"a": {"properties": {"z": {"$ref": "#/$defs/a", "type": "object"}}}},
                "$ref": "#/$defs/a",
            },
            "#/$defs/a/properties/z/$ref",
        ),
    ],
)
def test_what_cannot_be_enforced_is_named_and_can_be_left_out(schema: Json, place: str) -> None:
    before = json.dumps(schema)
    why = refusal(schema)
    assert why.startswith(f"{place} ")
    lenient = compiled(schema, lenient=True)
    [notice] = lenient.notices
    assert notice.startswith(f"schema: {why}, and is ")
    assert json.dumps(schema) == before
    walk(lenient.start(), random.Random(0), most=5)


def test_everything_left_out_is_named_and_the_rest_enforced() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
            "b": {"oneOf": [{"type": "number"}, {"type": "integer", "minimum": 3}]},
            "c": {"type": "string", "format": "hostname", "pattern": "(?!x)"},
        },
        "required": ["a"],
        "additionalProperties": False,
        "minProperties": 2,
    }
    lenient = compiled(schema, lenient=True)
    places = (
        "#/minProperties",
        "#/properties/a/uniqueItems",
        "#/properties/b/oneOf",
        "#/properties/c/pattern",
    )
    assert sorted(notice.split(" ")[1] for notice in lenient.notices) == sorted(places)
    assert "taken as anyOf" in " ".join(lenient.notices)
    constraint = lenient.start()
    assert takes(constraint, '{"a": [1, 1], "b": 3, "c": "x"}')
    assert not takes(constraint, '{"a": ["1"]}') and not takes(constraint, '{"a": [], "b": "x"}')
    assert not takes(constraint, '{"a": [], "c": "-"}')


# White space

PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}, "c": {}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": [None, None]}
SPACED = json.dumps(VALUE)
COMPACT = json.dumps(VALUE, separators=(",", ":"))
INDENTED = json.dumps(VALUE, indent=2)
UNEVEN = '{ "a" :1,\n\t"b": [\n null , null ]}'


@pytest.mark.parametrize(
    ("style", "texts"),
    [
        ("spaced", {SPACED}),
        ("compact", {COMPACT}),
    ],
)
def test_styles_space_json_as_they_say(style: JsonStyle, texts: set[str]) -> None:
    constraint = compiled(PERSON, style=style).start()
    for text in (SPACED, COMPACT, INDENTED, UNEVEN):
        assert takes(constraint, text) == (text in texts), text
        assert not takes(constraint, f" {text}") and not takes(constraint, f"{text}\n")


def test_the_schema_cannot_loosen_the_style() -> None:
    loose = PERSON | {"x-guidance": {"whitespace_flexible": True, "lenient": True}}
    constraint = compiled(loose).start()
    assert takes(constraint, SPACED) and not takes(constraint, UNEVEN)
    assert refusal(loose | {"not": {}}).startswith("#/not")


# Regular expressions and choices


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^a|b$", ["a", "b"], ["ax", "ab"]),
        (r"\d{2}-[a-z]+", ["12-x"], ["1-x", "٣٤-x"]),
        ("a/b\\/c", ["a/b/c"], []),
        ('"x"\n', ['"x"\n'], []),
        ("(?i)straße", ["STRASSE".replace("SS", "ß")], []),
        ("a.c", ["abc", "aéc"], ["a\nc"]),
        ("", [""], ["a"]),
        (r"\p{Lu}{2}", ["ÄB"], ["äB"]),
    ],
)
def test_regular_expressions_cover_the_whole_text(pattern: str, texts: list[str], others: list[str]) -> None:
    constraint = start(Grammar("regex", pattern))
    for text in texts:
        assert takes(constraint, text), text
    for text in others:
        assert not takes(constraint, text), text


@pytest.mark.parametrize(
    ("grammar", "what", "reason"),
    [
        (Grammar("regex", "("), "regular expression", "unclosed group"),
        (Grammar("regex", "a(?=b)"), "regular expression", "look-around"),
        (Grammar("regex", r"(a)\1"), "regular expression", "backreferences"),
        (Grammar("regex", r"[^\s\S]"), "regular expression", "nothing can match"),
        (Grammar("regex", "a\\"), "regular expression", "backslash"),
        (Grammar("regex", "a" * 1_000_001), "regular expression", "1,000,001 characters"),
        (Grammar("regex", "\ud800"), "regular expression", "surrogate"),
        (Grammar("choice", "[]"), "choice", "nothing to choose"),
        (Grammar("choice", '[""]'), "choice", "nothing to choose"),
        (Grammar("choice", '["a", 1]'), "choice", "not a list of texts"),
        (Grammar("choice", "yes"), "choice", "not a list of texts"),
        (Grammar("choice", '{"a": 1}'), "choice", "not a list of texts"),
        (Grammar("choice", '["\\ud800"]'), "choice", "surrogate"),
        (Grammar("lark", ""), "grammar", "no start rule"),
        (Grammar("lark", 'start: "a"\n\nfoo: ('), "grammar", "line 3, column"),
        (Grammar("lark", "start: a"), "grammar", "line 1, column 8: unknown name"),
        (Grammar("lark", "start: a\na: a"), "grammar", "nothing can match"),
    ],
)
def test_other_grammars_are_refused_with_a_reason(grammar: Grammar, what: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        COMPILER.compile(grammar)
    assert caught.value.what == what and caught.value.way_out and "\n" not in str(caught.value)


def test_a_lark_grammar_cannot_switch_forcing_on() -> None:
    grammar = Grammar("lark", 'start: "{" NAME\nNAME: "name"\n%llguidance {"no_forcing": false}')
    constraint = start(grammar)
    assert takes(constraint, "{name") and len(constraint.forced(())) > 0
