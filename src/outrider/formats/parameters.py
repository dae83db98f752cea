"""The parameters of a tool one by one, for formats that do not write them as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

ANYTHING = frozenset(("string", "number", "boolean", "null", "array", "object"))
"""Every type of JSON; integers are numbers."""

_MAX_LENGTH = 1_000
"""Longer bounds of a text would make patterns too large."""
_NO_RESTRICTIONS = frozenset(
    (
        "type",
        "anyOf",
        "oneOf",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "$defs",
        "definitions",
    )
)
_MAX_DEPTH = 16


class Parameter(NamedTuple):
    """A parameter, the JSON types that its values may have, the values themselves where they are listed, and
    their schema with all definitions."""

    name: str
    is_required: bool
    types: frozenset[str]
    values: tuple[Any, ...] | None
    schema: Any


def parameters_of(schema: Mapping[str, Any]) -> tuple[list[Parameter], bool]:
    """The parameters that the schema of an object names, in its order, and whether there may be others: a
    schema without properties allows any, and so does one that says so."""
    found = _followed(schema, schema)
    properties = found.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [], found.get("additionalProperties") is not False
    required = found.get("required")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters = []
    for name, one in properties.items():
        types, values = _types(one, schema), _values(one, schema)
        one = _followed(one, schema) if types == {"string"} else one
        whole = {**one, **definitions} if isinstance(one, Mapping) else one
        is_required = isinstance(required, list) and name in required
        parameters.append(Parameter(name, is_required, types, values, whole))
    return parameters, found.get("additionalProperties") not in (None, False)


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference within the document leads to; empty for one that leads nowhere."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for part in filter(None, reference.removeprefix("#").split("/")):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types of values that a schema allows, as far as it says so."""
    found = _followed(schema, root)
    types = ANYTHING
    if depth < _MAX_DEPTH:
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := found.get(keyword), list):
                types &= frozenset().union(*(_types(part, root, depth + 1) for part in parts))
    if (named := found.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        types &= {"number" if name == "integer" else name for name in names}
    if "const" in found:
        types &= {json_type(found["const"])}
    if isinstance(found.get("enum"), list):
        types &= {json_type(value) for value in found["enum"]}
    return types or ANYTHING


def json_type(value: object) -> str:
    """The JSON type of plain data."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str | list):
        return "string" if isinstance(value, str) else "array"
    return "object" if isinstance(value, Mapping) else "number"


def _values(schema: Any, root: Mapping[str, Any], depth: int = 0) -> tuple[Any, ...] | None:
    """The values that a schema lists; None where there are others."""
    found = _followed(schema, root)
    if "const" in found:
        return (found["const"],)
    if isinstance(found.get("enum"), list):
        return tuple(found["enum"])
    parts = found.get("anyOf", found.get("oneOf"))
    if isinstance(parts, list) and depth < _MAX_DEPTH:
        listed = [_values(part, root, depth + 1) for part in parts]
        return None if None in listed else tuple(value for part in listed if part for value in part)
    return (None,) if found.get("type") == "null" else None


def text_pattern(schema: Any, types: Set[str]) -> tuple[str, tuple[str, ...]]:
    """A regular expression of the texts that a schema allows, of which a string is one of the `types`, and
    the keywords that it leaves out."""
    left_out = sorted(_restrictions(schema))
    if types != {"string"} or not isinstance(schema, Mapping):
        return "(?s:.*)", tuple(left_out)
    bounds = {"minLength": schema.get("minLength", 0), "maxLength": schema.get("maxLength", "")}
    if all(
        bound == "" or (isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH) for bound in bounds.values()
    ):
        least, most = bounds.values()
        return f"(?s:.{{{least},{most}}})", tuple(key for key in left_out if key not in bounds)
    return "(?s:.*)", tuple(left_out)


def _restrictions(schema: Any) -> set[str]:
    """Keywords that allow less than the types do."""
    if not isinstance(schema, Mapping):
        return set()
    parts = [part for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for part in schema[key]]
    return (schema.keys() - _NO_RESTRICTIONS).union(*map(_restrictions, parts))
