"""A JSON schema as llguidance is to enforce it, or an error that names the place."""

from __future__ import annotations

import copy
import json
from time import perf_counter
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLParserLimits

from outrider.constraints.complaints import reason
from outrider.constraints.json_schema.check import SchemaCheck
from outrider.constraints.json_schema.document import Node, broken, read, target
from outrider.constraints.json_schema.merging import check_merging, endless
from outrider.core.params import JsonStyle

_MAX_REPAIRS = 100
_MAX_REPAIRING_S = 5.0
"""Each repair compiles the schema many times over."""
_MAX_LOCATED_PARTS = 300

_CAUSES = (
    ("in a registry", "$schema", "names a dialect that is not known"),
    (
        "oneOf constraints",
        "oneOf",
        "has alternatives that may overlap: that exactly one fits cannot be enforced",
    ),
    ("min/maxProperties", "minProperties", "cannot be enforced where keys are named but not required"),
    ("min/maxProperties", "maxProperties", "cannot be enforced where keys are named but not required"),
    ("not disjoint", "patternProperties", "has patterns that may overlap, which cannot be enforced"),
    ("sibling keys", "$ref", "leads back to itself beside other keywords, which cannot be enforced"),
    ("multipleOf", "multipleOf", "cannot be enforced"),
    ("multiple of", "multipleOf", "cannot be enforced"),
    ("regex", "pattern", "cannot be enforced"),
    ("regex", "patternProperties", "cannot be enforced"),
    ("integer range", "minimum", "cannot be enforced"),
)
"""What llguidance says, which keyword it then means, and what is to be said about it."""

_INDENTATION = r"\n( {2}){0,16}"
_ONE_BREAK_OR_BLANK = r" |\n[ \t]{0,32}"

_STYLES: dict[JsonStyle, dict[str, object]] = {
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "pretty": {
        "item_separator": f",{_INDENTATION}",
        "key_separator": ": ",
        "whitespace_pattern": _INDENTATION,
    },
    "flexible": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": _ONE_BREAK_OR_BLANK},
}
"""How JSON is spaced. The patterns match at most once between two tokens of JSON, and never before or after
the whole text: nothing can go on for ever."""

_ESCAPES = 'nrbtf\\"'
"""Without \\u: with it, "\\u0061" would pass for a name that a schema with the name "a" does not know."""


def prepare(text: str, style: JsonStyle, *, lenient: bool) -> tuple[str, tuple[str, ...]]:
    """The schema in the form that follows `%json`, and notices of what was left out. Raises GrammarError."""
    root = read(text)
    if root is False:
        raise broken("it is false, so that nothing fits")
    document: Node = {} if root is True else root
    check = SchemaCheck(document, lenient)
    check_merging(document)
    until_s = perf_counter() + _MAX_REPAIRING_S
    for _ in range(_MAX_REPAIRS):
        if (problem := _problem(document)) is None:
            break
        if perf_counter() > until_s:
            raise broken(f"too much of it cannot be enforced ({reason(problem)})", "Simplify it.")
        _repair(check, problem)
    if (pointer := endless(document, check.parts)) is not None:
        raise broken(f"{pointer} can never be complete: it requires itself")
    options = {**_STYLES[style], "json_allowed_escapes": _ESCAPES}
    return json.dumps({**document, "x-guidance": options}), tuple(check.notices)


def _problem(schema: Node) -> str | None:
    """The error of llguidance, if it cannot compile the schema."""
    limits = LLParserLimits(verbose_errors=False)
    source = f"start: %json {json.dumps(schema)}"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=limits)
    return messages[0] if is_error else None


def _repair(check: SchemaCheck, problem: str) -> None:
    """Leave out what cannot be enforced, or say where and why that is not possible."""
    pointer, problem = _locate(check, problem)
    part = check.parts[pointer]
    for sign, keyword, why in _CAUSES:
        if sign not in problem or keyword not in part or "Unsatisfiable" in problem:
            continue
        why = f"{why} ({reason(problem)})" if why == "cannot be enforced" else why
        alternatives = part.get("oneOf") if keyword == "oneOf" and "anyOf" not in part else None
        check.leave_out(pointer, keyword, why)
        if alternatives is not None:
            part["anyOf"] = alternatives
            check.notices[-1] = f"schema: {pointer}/oneOf {why}, and is taken as anyOf"
        return
    if "Unsatisfiable" in problem or "empty" in problem:
        raise broken(f"{pointer}: nothing fits ({reason(problem)})")
    raise broken(f"{pointer}: {reason(problem)}")


def _locate(check: SchemaCheck, problem: str) -> tuple[str, str]:
    """The innermost part that cannot be compiled, and the error there."""
    if len(check.parts) <= _MAX_LOCATED_PARTS:
        inside = _as_definition(check)
        for pointer in reversed(check.parts):
            inner = _problem({**inside, "$ref": f"#/$defs/root{quote(pointer[1:])}"})
            if inner is not None:
                return pointer, inner
    return "#", problem


def _as_definition(check: SchemaCheck) -> Node:
    """A document that holds the schema as a definition, so that any part of it can be referred to."""
    root: dict[str, Any] = copy.deepcopy(check.root)
    root.pop("$id", None)
    for pointer in check.parts:
        part = target(root, "#", f"#{quote(pointer[1:])}")[1]
        reference = part.get("$ref", "")
        if reference == "#" or reference.startswith("#/"):
            part["$ref"] = f"#/$defs/root{reference[1:]}"
    document: Node = {"$defs": {"root": root}}
    return document | ({"$schema": root.pop("$schema")} if "$schema" in root else {})
