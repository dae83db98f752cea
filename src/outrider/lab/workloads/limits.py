"""What limits an answer: the fields of a request's body that ask for a schema or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from outrider.core.data import Grammar

__all__ = ["grammar_of_fields"]

_OBJECT = {"type": "object"}


def grammar_of_fields(body: Mapping[str, Any], complain: Callable[[str], Exception]) -> Grammar | None:
    """The grammar that a body asks for, in any server's field, as `outrider serve` reads it; None where it
    asks for none. Raises what `complain` makes of a reason."""
    nested = body.get("structured_outputs") or {}
    if not isinstance(nested, dict):
        raise complain("its structured_outputs is no object")
    fields = {name: value for name, value in body.items() if name != "structured_outputs"}
    fields |= {f"guided_{name}": value for name, value in nested.items() if value is not None}
    for name, read in _READ.items():
        if fields.get(name) is not None:
            try:
                return read(fields[name])
            except (AttributeError, KeyError, TypeError, ValueError):
                raise complain(f"its {name} asks for nothing that is known") from None
    return None


def _format(value: Any) -> Grammar | None:
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return _schema(value.get("schema") or _OBJECT)
        case "json_schema":  # the Responses API has the schema's fields without a level of their own
            named = value.get("json_schema", value)
            return _schema(named["schema"], lenient=named.get("strict") is False)
    raise ValueError


def _schema(value: Any, *, lenient: bool = False) -> Grammar:
    if not isinstance(value, str | dict):
        raise TypeError
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value), lenient=lenient)


def _grammar(value: Any) -> Grammar:
    return Grammar("gbnf" if "::=" in value else "lark", _text(value))


def _regex(value: Any) -> Grammar:
    return Grammar("regex", _text(value))


def _choice(value: Any) -> Grammar:
    return Grammar("choice", json.dumps([_text(part) for part in value]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_READ: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _format,
    "json_schema": _schema,
    "grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "guided_json_object": lambda _: _schema(_OBJECT),
}
