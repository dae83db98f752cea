"""JSON schemas are enforced: the JSON Schema Test Suite (data/json_schema_test_suite) to the letter, but for
what is listed here with its reason; and under random schemas only what is valid is written.

A constraint is about texts, a test case about documents. A document counts as accepted when one of its
texts may be written: with its properties in any order (a constraint fixes the order) and its numbers in
any of their plain forms (`1.0`, `1`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from examples import examples
from grammars import allowed
from outrider.constraints.compiler import Compiler, GrammarConstraint
from outrider.core.data import Grammar
from outrider.core.errors import ConstraintError, GrammarError
from outrider.core.params import JsonStyle
from vocabularies import TableVocabulary, Token, bytes_and

SUITE = Path(__file__).parent / "data" / "json_schema_test_suite" / "draft2020-12.jsonl"
MAX_TEXTS = 2000
"""of one document; none of the suite has more"""

Kind = Literal["refused", "accepted", "failed"]
"""A valid document that cannot be written, an invalid one that can, an error on the way."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and its documents, each with whether it is valid."""

    file: str
    description: str
    schema: Any
    documents: tuple[tuple[str, Any, bool], ...]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A document on which constraint and suite disagree, or several: `case` and `test` may hold `*`."""

    kind: Kind
    file: str
    case: str
    test: str

    def covers(self, found: Deviation) -> bool:
        return (self.kind, self.file) == (found.kind, found.file) and all(
            fnmatchcase(text, pattern) for text, pattern in ((found.case, self.case), (found.test, self.test))
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: `refusal` is why its schema was not taken."""

    case: Case
    refusal: GrammarError | None = None
    deviations: tuple[Deviation, ...] = ()


VOCABULARY = TableVocabulary([*bytes_and(), Token(b"<end>", control=True, end=True, piece=b"")])
COMPILER = Compiler(VOCABULARY)
END = 256


def read_suite() -> list[Case]:
    rows = [json.loads(line) for line in SUITE.read_text(encoding="utf-8").splitlines()]
    return [
        Case(
            row["file"],
            row["description"],
            row["schema"],
            tuple((test["description"], test["data"], test["valid"]) for test in row["tests"]),
        )
        for row in rows
    ]


def judge(case: Case) -> Outcome:
    """Put every document of a case to the constraint that its schema compiles to."""
    try:
        compiled = COMPILER.compile(Grammar("json_schema", json.dumps(case.schema), fast_forward="off"))
    except GrammarError as error:
        return Outcome(case, error)
    found = []
    for description, document, valid in case.documents:
        kind: Kind | None = None
        try:
            texts = islice(texts_of(document), MAX_TEXTS)
            accepted = any(may_be_written(compiled.start(), text) for text in texts)
            if accepted != valid:
                kind = "refused" if valid else "accepted"
        except ConstraintError:
            kind = "failed"
        if kind is not None:
            found.append(Deviation(kind, case.file, case.description, description))
    return Outcome(case, None, tuple(found))


def may_be_written(constraint: GrammarConstraint, text: str) -> bool:
    """Whether this whole text, and nothing after it, may be the output."""
    tokens = VOCABULARY.tokenize(text, add_special=False)
    if constraint.permits((), tokens) < len(tokens):
        return False
    constraint.accept(tokens)
    return constraint.is_accepted


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a document in the default style, with characters as they are."""
    if isinstance(value, dict):
        members = [[f"{_string(key)}: {text}" for text in texts_of(item)] for key, item in value.items()]
        for order in permutations(members):
            yield from ("{" + ", ".join(chosen) + "}" for chosen in product(*order))
    elif isinstance(value, list):
        items = [list(texts_of(item)) for item in value]
        yield from ("[" + ", ".join(chosen) + "]" for chosen in product(*items))
    elif isinstance(value, float):
        yield from _numbers(value)
    else:
        yield _string(value)


def _string(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _numbers(value: float) -> Iterator[str]:
    # A constraint may want as many decimals as `multipleOf` has.
    forms = [repr(value), f"{Decimal(repr(value)):f}"]
    forms += [padded for padded in (f"{value:.1f}", f"{value:.2f}") if float(padded) == value]
    if math.isfinite(value) and value == int(value):
        forms.append(str(int(value)))
    yield from dict.fromkeys(forms)


KNOWN = {
    "formats are enforced, which the standard leaves open": [
        Deviation("refused", "format", f"{name} format", "invalid * string is only an annotation by default")
        for name in (
            *("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration"),
        )
    ],
    "a date may be the 29th or 30th of any February, a leap second may come at any time": [
        Deviation(
            "accepted", "optional/format/date", "validation of date strings", "*29 days in February (normal)"
        ),
        Deviation(
            "accepted", "optional/format/date", "validation of date strings", "2021 is not a leap year"
        ),
        Deviation(
            "accepted", "optional/format/date-time", "validation of date-time strings", "*leap second on*"
        ),
        Deviation("accepted", "optional/format/time", "validation of time strings", "*invalid leap second*"),
    ],
    "rare forms of addresses are not in the expressions for them": [
        Deviation("refused", "optional/format/email", "validation of e-mail addresses", "a quoted string*"),
        Deviation(
            "refused", "optional/format/email", "validation of e-mail addresses", "an IPv6-address-literal*"
        ),
        Deviation("refused", "optional/format/ipv6", "validation of IPv6 addresses", "mixed format*"),
        Deviation("refused", "optional/format/ipv6", "validation of IPv6 addresses", "a long valid ipv6"),
    ],
    "control characters that JSON has no short escape for are never written": [
        Deviation("refused", "optional/ecmascript-regex", "*\\s matches whitespace", "Line tabulation*"),
        Deviation(
            "refused", "optional/ecmascript-regex", "*\\S matches everything*", "Non-whitespace control*"
        ),
    ],
    "the byte order mark is no white space to \\s": [
        Deviation(
            "refused", "optional/ecmascript-regex", "*\\s matches whitespace", "zero-width whitespace*"
        ),
        Deviation(
            "accepted", "optional/ecmascript-regex", "*\\S matches everything*", "zero-width whitespace*"
        ),
    ],
}
MIN_COMPILED = 190
"""Schemas of the suite that were enforced when this was written; fewer is a loss."""


@cache
def outcomes() -> tuple[Outcome, ...]:
    return tuple(map(judge, read_suite()))


def deviations() -> Iterator[Deviation]:
    for outcome in outcomes():
        yield from outcome.deviations


def test_no_valid_document_is_refused_and_no_invalid_one_accepted() -> None:
    known = [listed for each in KNOWN.values() for listed in each]
    assert [found for found in deviations() if not any(listed.covers(found) for listed in known)] == []


@pytest.mark.parametrize("reason", KNOWN)
def test_a_known_deviation_is_still_there(reason: str) -> None:
    found = list(deviations())
    assert [listed for listed in KNOWN[reason] if not any(map(listed.covers, found))] == []


def test_schemas_that_cannot_be_enforced_are_refused_by_place() -> None:
    refused = [outcome for outcome in outcomes() if outcome.refusal is not None]
    assert len(outcomes()) - len(refused) >= MIN_COMPILED
    for outcome in refused:
        assert outcome.refusal is not None
        assert outcome.refusal.what.startswith("schema") and outcome.refusal.why, outcome.case


# Random schemas

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
    leaves = st.one_of(_numeric(), _strings(), _values(), st.just({"$ref": "#/$defs/again"}), st.just(True))
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


def _numeric() -> st.SearchStrategy[Schema]:
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
        st.tuples(_numeric(), _strings(), _arrays(inner)).map(lambda options: {"oneOf": list(options)}),
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


def walk(constraint: GrammarConstraint, rng: random.Random) -> str | None:
    """A text of random allowed bytes; None where it did not come to an end."""
    out = bytearray()
    while not constraint.is_complete:
        options = allowed(constraint)
        hurry = len(out) > SHORT
        if options[-1] == END and (hurry or rng.random() < 0.3):
            break
        options = [token for token in options if token != END]
        closers = [token for token in options if token in b'"}],:']
        token = rng.choice(closers if closers and (hurry or rng.random() < 0.4) else options)
        constraint.accept([token])
        out.append(token)
        if len(out) > LONG:
            return None
    return out.decode()


STYLES: tuple[JsonStyle, ...] = ("spaced", "compact")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


@settings(max_examples=examples(100), suppress_health_check=SLOW)
@given(schemas(), st.sampled_from(STYLES), st.integers(0, 2**32))
def test_a_random_text_under_the_masks_is_valid(schema: Schema, style: JsonStyle, seed: int) -> None:
    try:
        ready = COMPILER.compile(Grammar("json_schema", json.dumps(schema), style))
    except GrammarError as error:
        event(f"refused: {error.why[:60]}")
        return
    rng = random.Random(seed)
    for _ in range(3):
        text = walk(ready.start(), rng)
        event("given up" if text is None else "written")
        if text is not None:
            assert validator(schema).is_valid(read(text)), text
