"""The parameters of a tool one by one, for formats that do not write them as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ANYTHING = frozenset(("string", "number", "boolean", "null", "array", "object"))
"""Every type of JSON; integers are numbers."""

_MAX_LENGTH = 1_000
"""Longer bounds of a text would make patterns too large."""
_UNQUOTED = ("pattern", "format")
_MAX_DEPTH = 16


class Parameter(NamedTuple):
    """A parameter, the JSON types that its values may have, and their schema with all definitions."""

    name: str
    is_required: bool
    types: frozenset[str]
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
        types = _types(one, schema)
        one = _followed(one, schema) if types == {"string"} else one
        whole = {**one, **definitions} if isinstance(one, Mapping) else one
        is_required = isinstance(required, list) and name in required
        parameters.append(Parameter(name, is_required, types, whole))
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


def text_choices(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a schema lists; none: it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return [text for text in listed if isinstance(text, str)]


def text_pattern(schema: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """A regular expression of the texts that a schema of texts allows, and what of it it leaves out."""
    least, most = (schema.get(keyword) for keyword in ("minLength", "maxLength"))
    left_out = [keyword for keyword in (*_UNQUOTED, "anyOf", "oneOf", "allOf", "not") if keyword in schema]
    if least is None and most is None:
        return "(?s:.*)", tuple(left_out)
    if not all(isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH for bound in (least or 0, most or 0)):
        return "(?s:.*)", (*left_out, "minLength and maxLength")
    return f"(?s:.{{{least or 0},{'' if most is None else most}}})", tuple(left_out)
