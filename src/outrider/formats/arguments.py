"""The schema of a tool's arguments, as it can be enforced."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from outrider.constraints.json_schema import prepare, writing_options
from outrider.core.errors import GrammarError
from outrider.formats.data import ToolSpec

_COMBINED = frozenset(("anyOf", "oneOf", "$ref"))
_SCHEMAS = frozenset(("additionalProperties", "anyOf", "items", "oneOf", "prefixItems"))
_SCHEMA_MAPS = frozenset(("$defs", "definitions", "patternProperties", "properties"))


def arguments_schema(tool: ToolSpec) -> tuple[str, tuple[str, ...]]:
    """The schema as it stands behind `%json`, and notices of what of it is not enforced.

    Raises GrammarError, which names the tool, where a strict one cannot be enforced.
    """
    try:
        text = json.dumps(tool.parameters)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the schema of its arguments is no JSON ({error})"
        raise GrammarError(f"tool {tool.name}", why, "Give plain data.") from None
    return _prepared(tool.name, text, tool.strict)


@lru_cache(maxsize=512)
def _prepared(name: str, text: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    try:
        schema, notices = prepare(
            json.dumps(_object(json.loads(text))), writing_options("spaced"), lenient=not strict
        )
    except GrammarError as error:
        if strict:
            way_out = f"{error.way_out} Or leave out strict.".strip()
            raise GrammarError(f"tool {name}", f"{error.what} {error.why}", way_out) from None
        schema, _ = prepare('{"type": "object"}', writing_options("spaced"), lenient=False)
        why = f"{error.what} {error.why}"
        return schema, (f"tool {name}: {why}; its arguments may be any object",)
    return schema, tuple(f"tool {name}: {notice}" for notice in notices)


def _object(schema: dict[str, Any]) -> Any:
    """The schema of an object, which has no other properties than it names."""
    named = schema.get("type", "object")
    if "object" not in (named if isinstance(named, list) else [named]):
        raise GrammarError("schema", f"#/type is {named!r}, and arguments are an object", "Correct it.")
    typed = {**schema, "type": "object"}
    return typed if '"allOf"' in json.dumps(typed) else _closed(typed)


def _closed(schema: Any) -> Any:
    """Without properties that it does not name, where it says nothing of others: a model that may write
    them does not stop. Objects that are combined with other schemas stay as they are."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict) or ("properties" in schema and not _COMBINED.isdisjoint(schema)):
        return schema
    closed = dict(schema)
    for keyword in _SCHEMAS & schema.keys():
        closed[keyword] = _closed(schema[keyword])
    for keyword in _SCHEMA_MAPS & schema.keys():
        if isinstance(schema[keyword], dict):
            closed[keyword] = {name: _closed(part) for name, part in schema[keyword].items()}
    if "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
