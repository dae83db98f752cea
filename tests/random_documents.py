"""Random JSON documents: any, and such as a schema may have been written for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Schema = bool | dict[str, Any]

NAMES = ("a", "b", "ab", "", "ü", 'q"', "x y")

_SCALARS = (
    st.none() | st.booleans() | st.integers(-20, 120) | st.sampled_from(["", "a", "ab", "é", 'q"', "\n"])
)


def scalars() -> st.SearchStrategy[Any]:
    return _SCALARS | st.integers(-200, 200).map(lambda n: n / 4)


def documents() -> st.SearchStrategy[Any]:
    """Any small document: seldom valid, often nearly."""
    return st.recursive(
        scalars(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
        ),
        max_leaves=5,
    )


def matching(schema: Schema, again: Schema | None = None) -> st.SearchStrategy[Any]:
    """Documents made for the schema: often valid, since most keywords are followed, but not always.
    `again` is what a reference stands for, once."""
    if isinstance(schema, bool):
        return documents()
    again = schema.get("$defs", {}).get("again", again)
    if "$ref" in schema:
        return st.none() if again is None else matching(again)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return st.one_of([matching(option, again) for option in schema[keyword]])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of([_MATCHING[kind](schema, again) for kind in kinds])


def _matching_object(schema: dict[str, Any], again: Schema | None) -> st.SearchStrategy[Any]:
    known = {name: matching(inner, again) for name, inner in schema.get("properties", {}).items()}
    others = {**schema.get("patternProperties", {}), "": schema.get("additionalProperties", True)}
    allowed = [matching(inner, again) for inner in others.values() if inner is not False]
    other = st.one_of(allowed or [documents()])
    required = {name: known.pop(name, other) for name in schema.get("required", ())}
    more = st.dictionaries(st.sampled_from(NAMES), other, max_size=2 if allowed else 0)
    return st.tuples(more, st.fixed_dictionaries(required, optional=known)).map(lambda two: two[0] | two[1])


def _matching_array(schema: dict[str, Any], again: Schema | None) -> st.SearchStrategy[Any]:
    first = [matching(inner, again) for inner in schema.get("prefixItems", ())]
    inner = schema.get("items", True)
    least = max(schema.get("minItems", 0) - len(first), 0)
    most = max(schema.get("maxItems", 3) - len(first), least)
    rest = (
        st.lists(matching(inner, again), min_size=least, max_size=most) if inner is not False else st.just([])
    )
    return st.tuples(st.tuples(*first), rest).map(lambda two: [*two[0], *two[1]][: schema.get("maxItems")])


def _matching_number(schema: dict[str, Any], again: Schema | None) -> st.SearchStrategy[Any]:
    del again
    bounds = [value for name, value in schema.items() if name.startswith(("min", "max", "excl"))]
    step = schema.get("multipleOf", 1)
    near = st.sampled_from(bounds or [0]).flatmap(
        lambda bound: st.integers(-4, 4).map(lambda n: round(bound / step) * step + n * step)
    )
    return near | st.sampled_from(bounds or [0]) | st.integers(-300, 300).map(lambda n: n / 8)


def _matching_string(schema: dict[str, Any], again: Schema | None) -> st.SearchStrategy[Any]:
    del again
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], alphabet=_LETTERS)
    if "format" in schema:
        return st.sampled_from([*_IN_FORMATS, *(text[1:] for text in _IN_FORMATS)])
    least = schema.get("minLength", 0)
    return st.text(_LETTERS, min_size=least, max_size=max(least, schema.get("maxLength", 9)))


def _matching_other(schema: dict[str, Any], again: Schema | None) -> st.SearchStrategy[Any]:
    del again
    return st.none() if schema["type"] == "null" else st.booleans() | st.none()


_LETTERS = st.sampled_from('abcxyz019 "\\/\n\té💩')
_IN_FORMATS = ["10.0.0.255", "256.1.1.1", "123e4567-e89b-12d3-a456-426614174000"]
_MATCHING: dict[str, Callable[[dict[str, Any], Schema | None], st.SearchStrategy[Any]]] = {
    "object": _matching_object,
    "array": _matching_array,
    "number": _matching_number,
    "integer": _matching_number,
    "string": _matching_string,
    "null": _matching_other,
    "boolean": _matching_other,
}
