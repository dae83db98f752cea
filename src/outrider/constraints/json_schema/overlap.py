"""Whether no value fits two of a list of schemas: then `oneOf` means what `anyOf` means.

A proof that is sought where it is usual: other types, other constants, or objects with a key that one
of them requires and whose values differ. What is not proved counts as an overlap.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from outrider.constraints.json_schema.document import Node, target
from outrider.constraints.json_schema.keywords import TYPES

_JSON_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    str: "string",
    list: "array",
    dict: "object",
    int: "integer",
    float: "integer",
}
_MAX_REFERENCES = 20
_MAX_SCHEMAS = 300


def excludes(root: Node, schemas: list[Any]) -> bool:
    """Whether every two of the schemas exclude each other."""
    plain = [_resolved(root, schema) for schema in schemas]
    return len(plain) <= _MAX_SCHEMAS and all(_apart(root, a, b, 0) for a, b in combinations(plain, 2))


def _resolved(root: Node, schema: Any) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = target(root, "#", schema["$ref"])[1]
    return schema


def _apart(root: Node, one: Any, other: Any, depth: int) -> bool:
    one, other = _resolved(root, one), _resolved(root, other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > 3:
        return False
    types, others = _types(one), _types(other)
    if not types & others:
        return True
    values, other_values = _constants(one), _constants(other)
    if values is not None and other_values is not None and not values & other_values:
        return True
    return types & others == {"object"} and any(
        _apart(root, a["properties"][key], b["properties"][key], depth + 1)
        for a, b in ((one, other), (other, one))
        for key in a.get("required", ())
        if key in a.get("properties", {}) and key in b.get("properties", {})
    )


def _types(schema: Node) -> set[str]:
    constants = _constants(schema)
    if constants is not None:
        return {_JSON_TYPES[type(json.loads(text))] for text in constants}
    named = schema.get("type")
    types = set(TYPES) if named is None else {named} if isinstance(named, str) else set(named)
    return types | {"integer"} if "number" in types else types


def _constants(schema: Node) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in values)
    return {json.dumps(value, sort_keys=True) for value in whole}
