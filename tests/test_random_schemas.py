"""Random JSON schemas of what the constraints support, and random texts under a constraint's masks."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from examples import examples
from json_schema_suite import byte_vocabulary
from outrider.constraints.compiler import Compiled, Compiler
from outrider.core.contracts import Constraint, Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import JsonStyle

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


PATTERNS = ("^a", "b$", "^[a-c]{1,3}$", "[0-9]", "^(?:x|yy)*$", "é")
FORMATS = ("ipv4", "uuid")  # of those that jsonschema judges alone, the ones that are enforced entirely
SHORT, LONG = 200, 4000
"""bytes: texts are steered to their end from the one on, and given up at the other"""


def schemas() -> st.SearchStrategy[Schema]:
    """Schemas up to a few levels deep; `#/$defs/again` is a schema that may contain itself."""
    leaves = st.one_of(_numbers(), _strings(), _values(), st.just({"$ref": "#/$defs/again"}), st.just(True))
    nested = st.recursive(
        leaves, lambda inner: st.one_of(_objects(inner), _arrays(inner), _unions(inner)), max_leaves=6
    )
    return st.builds(_with_definition, nested, nested)


def _with_definition(schema: Schema, again: Schema) -> Schema:
    if isinstance(schema, bool) or '"$ref"' not in json.dumps([schema, again]):
        return schema
    guarded = {"type": "array", "items": again, "maxItems": 2}  # a schema that is itself has no meaning
    return {"allOf": [schema], "$defs": {"again": {"anyOf": [{"type": "null"}, guarded]}}}


def _some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def _typed(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=keywords).map(_ordered)


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    """With lower bounds below upper ones: else nothing fits, and the schema is refused."""
    for what in ("imum", "Length", "Items", "Properties"):
        low, high = f"min{what}", f"max{what}"
        if low in schema and high in schema and schema[low] > schema[high]:
            schema = {**schema, low: schema[high], high: schema[low]}
    return schema


def _numbers() -> st.SearchStrategy[Schema]:
    bound = st.integers(-50, 150) | st.integers(-200, 600).map(lambda n: n / 4)
    limits = {name: bound for name in ("minimum", "maximum", "exclusiveMinimum")}
    steps = st.sampled_from([1, 2, 3, 7, 0.5, 0.25])
    kinds = st.sampled_from(["number", "integer"])
    return kinds.flatmap(lambda kind: _typed(kind, **limits, multipleOf=steps))


def _strings() -> st.SearchStrategy[Schema]:
    length = st.integers(0, 6)
    return st.one_of(
        _typed("string", minLength=length, maxLength=length),
        _typed("string", pattern=st.sampled_from(PATTERNS), maxLength=length),
        _typed("string", format=st.sampled_from(FORMATS)),
    )


def _values() -> st.SearchStrategy[Schema]:
    return st.one_of(
        scalars().map(lambda value: {"const": value}),
        documents().map(lambda value: {"const": value}),
        st.lists(scalars(), min_size=1, max_size=4).map(lambda values: {"enum": values}),
        st.sampled_from(["null", "boolean", "integer", "string"]).map(lambda kind: {"type": kind}),
        st.just({"type": ["string", "null", "integer"]}),
    )


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.sampled_from(NAMES)
    return _typed(
        "object",
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=1),
        minProperties=st.integers(0, 1),  # beyond that a name that is repeated counts twice
        maxProperties=st.integers(0, 3),
    )


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return _typed(
        "array",
        items=inner | st.booleans(),
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        maxItems=st.integers(0, 3),
    )


def _unions(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda options: {"anyOf": options}),
        st.tuples(_numbers(), _strings(), _arrays(inner)).map(lambda options: {"oneOf": list(options)}),
        several.map(lambda options: {"allOf": options}),
        st.tuples(_some(minLength=st.integers(0, 3), minimum=st.integers(0, 9)), inner).map(
            lambda pair: {**pair[0], "anyOf": [pair[1], {"type": "null"}]}
        ),
    )


def validator(schema: Schema) -> jsonschema.Draft202012Validator:
    """Judges documents read by `read`, by decimal arithmetic. JSON Schema's `$` matches at the end alone."""
    text = json.dumps(schema)
    for pattern in PATTERNS:
        text = text.replace(json.dumps(pattern), json.dumps(pattern.replace("$", r"\Z")))
    return jsonschema.Draft202012Validator(
        read(text), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )


def read(text: str) -> Any:
    """A document with its numbers as they are written."""
    return json.loads(text, parse_float=Decimal)


def walk(constraint: Constraint, vocabulary: Vocabulary, rng: random.Random) -> str | None:
    """A text of random allowed tokens; None where it did not come to an end."""
    out: list[int] = []
    closing = {vocabulary.tokenize(character)[0] for character in '"}],:'}
    while not constraint.is_complete:
        mask = constraint.allowed(())
        allowed = list(range(vocabulary.size)) if mask is None else np.flatnonzero(mask).tolist()
        ends = [token for token in allowed if vocabulary.ends_generation(token)]
        closers = [token for token in allowed if token in closing]
        hurry = len(out) > SHORT
        if ends and (hurry or rng.random() < 0.3):
            break
        content = [token for token in allowed if token not in ends]
        pool = closers if closers and (hurry or rng.random() < 0.4) else content
        token = rng.choice(pool)
        constraint.accept([token])
        out.append(token)
        if len(out) > LONG:
            return None
    return b"".join(vocabulary.piece(token) for token in out).decode("utf-8")


# What is written under them is valid

VOCABULARY = byte_vocabulary()
COMPILER = Compiler(VOCABULARY)
STYLES: tuple[JsonStyle, ...] = ("spaced", "compact")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def compiled(schema: Schema, style: JsonStyle = "spaced") -> Compiled | None:
    """The schema, ready to use; None where it is refused."""
    try:
        return COMPILER.compile(Grammar("json_schema", json.dumps(schema), style))
    except GrammarError as error:
        event(f"refused: {error.why[:60]}")
        return None


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(schemas(), st.sampled_from(STYLES), st.integers(0, 2**32))
def test_a_random_text_under_the_masks_is_valid(schema: Schema, style: JsonStyle, seed: int) -> None:
    ready, rng = compiled(schema, style), random.Random(seed)
    for _ in range(3 if ready else 0):
        assert ready is not None
        text = walk(ready.start(), VOCABULARY, rng)
        event("given up" if text is None else "written")
        if text is not None:
            assert validator(schema).is_valid(read(text)), text
