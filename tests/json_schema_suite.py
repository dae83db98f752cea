"""The JSON Schema Test Suite put to the constraints: which documents may be written under a schema?

A constraint is about texts, a test case about documents. A document counts as accepted when one of its
texts may be written: with its properties in any order (a constraint fixes the order) and its numbers in
any of their plain forms (`1.0`, `1`).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Literal

from outrider.constraints.compiler import Compiler
from outrider.constraints.walker import GrammarConstraint
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import ConstraintError, GrammarError
from vocabularies import TableVocabulary, Token

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
    """A document on which constraint and suite disagree."""

    kind: Kind
    file: str
    case: str
    test: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: `refusal` is why its schema was not taken."""

    case: Case
    refusal: GrammarError | None = None
    deviations: tuple[Deviation, ...] = ()


def byte_vocabulary() -> TableVocabulary:
    """One token for each byte, and an end token."""
    bytes_ = [Token(bytes([value])) for value in range(256)]
    return TableVocabulary([*bytes_, Token(b"<end>", control=True, end=True, piece=b"")])


def read_suite(path: Path = SUITE) -> list[Case]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Case(
            row["file"],
            row["description"],
            row["schema"],
            tuple((test["description"], test["data"], test["valid"]) for test in row["tests"]),
        )
        for row in rows
    ]


def judge(case: Case, compiler: Compiler, vocabulary: Vocabulary, *, lenient: bool = False) -> Outcome:
    """Put every document of a case to the constraint that its schema compiles to."""
    try:
        compiled = compiler.compile(grammar_of(case, lenient=lenient))
    except GrammarError as error:
        return Outcome(case, error)
    found = []
    for description, document, valid in case.documents:
        kind: Kind | None = None
        try:
            accepted = any(may_be_written(compiled.start(), vocabulary, text) for text in texts(document))
            if accepted != valid:
                kind = "refused" if valid else "accepted"
        except ConstraintError:
            kind = "failed"
        if kind is not None:
            found.append(Deviation(kind, case.file, case.description, description))
    return Outcome(case, None, tuple(found))


def grammar_of(case: Case, *, lenient: bool = False) -> Grammar:
    return Grammar("json_schema", json.dumps(case.schema), lenient=lenient, fast_forward="off")


def may_be_written(constraint: GrammarConstraint, vocabulary: Vocabulary, text: str) -> bool:
    """Whether this whole text, and nothing after it, may be the output."""
    tokens = vocabulary.tokenize(text, add_special=False)
    if constraint.permits((), tokens) < len(tokens):
        return False
    constraint.accept(tokens)
    return constraint.is_accepted


def texts(document: Any) -> Iterator[str]:
    """The texts of a document in the default style, with characters as they are."""
    return islice(_texts(document), MAX_TEXTS)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        members = [[f"{_string(key)}: {text}" for text in _texts(item)] for key, item in value.items()]
        for order in permutations(members):
            yield from ("{" + ", ".join(chosen) + "}" for chosen in product(*order))
    elif isinstance(value, list):
        items = [list(_texts(item)) for item in value]
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
