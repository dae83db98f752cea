"""The parameters of a tool one by one, for formats that do not write them as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from outrider.constraints.json_schema import ANYTHING, Document

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


class Parameter(NamedTuple):
    """A parameter, the JSON types that its values may have, the values themselves where they are listed, and
    their schema with all definitions."""

    name: str
    is_required: bool
    types: Set[str]
    values: tuple[Any, ...] | None
    schema: Any


def parameters_of(schema: Mapping[str, Any]) -> tuple[list[Parameter], bool]:
    """The parameters that the schema of an object names, in its order, and whether there may be others: a
    schema without properties allows any, and so does one that says so."""
    document = Document(schema)
    found = document.resolved(schema)
    found = found if isinstance(found, Mapping) else {}
    properties = found.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [], found.get("additionalProperties") is not False
    required = found.get("required")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters = []
    for name, one in properties.items():
        types, values = document.types(one) or ANYTHING, document.values(one)
        one = document.resolved(one) if types == {"string"} else one
        whole = {**one, **definitions} if isinstance(one, Mapping) else one
        is_required = isinstance(required, list) and name in required
        parameters.append(Parameter(name, is_required, types, values, whole))
    return parameters, found.get("additionalProperties") not in (None, False)


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
