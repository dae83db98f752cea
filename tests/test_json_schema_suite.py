"""The JSON Schema Test Suite (data/json_schema_test_suite): every schema that compiles is enforced to the
letter, but for what is listed here with its reason."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import pytest

from json_schema_suite import (
    Deviation,
    Kind,
    Outcome,
    byte_vocabulary,
    judge,
    read_suite,
)
from outrider.constraints.compiler import Compiler


@dataclass(frozen=True, slots=True)
class Known:
    """Documents on which constraint and suite disagree; `case` and `test` may hold `*`."""

    kind: Kind
    file: str
    case: str
    test: str

    def covers(self, found: Deviation) -> bool:
        return (self.kind, self.file) == (found.kind, found.file) and all(
            fnmatchcase(text, pattern) for text, pattern in ((found.case, self.case), (found.test, self.test))
        )


KNOWN = {
    "formats are enforced, which the standard leaves open": [
        Known("refused", "format", f"{name} format", "invalid * string is only an annotation by default")
        for name in (
            *("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration"),
        )
    ],
    "a date may be the 29th or 30th of any February, a leap second may come at any time": [
        Known(
            "accepted", "optional/format/date", "validation of date strings", "*29 days in February (normal)"
        ),
        Known("accepted", "optional/format/date", "validation of date strings", "2021 is not a leap year"),
        Known("accepted", "optional/format/date-time", "validation of date-time strings", "*leap second on*"),
        Known("accepted", "optional/format/time", "validation of time strings", "*invalid leap second*"),
    ],
    "rare forms of addresses are not in the expressions for them": [
        Known("refused", "optional/format/email", "validation of e-mail addresses", "a quoted string*"),
        Known(
            "refused", "optional/format/email", "validation of e-mail addresses", "an IPv6-address-literal*"
        ),
        Known("refused", "optional/format/ipv6", "validation of IPv6 addresses", "mixed format*"),
        Known("refused", "optional/format/ipv6", "validation of IPv6 addresses", "a long valid ipv6"),
    ],
    "control characters that JSON has no short escape for are never written": [
        Known("refused", "optional/ecmascript-regex", "*\\s matches whitespace", "Line tabulation*"),
        Known("refused", "optional/ecmascript-regex", "*\\S matches everything*", "Non-whitespace control*"),
    ],
    "the byte order mark is no white space to \\s": [
        Known("refused", "optional/ecmascript-regex", "*\\s matches whitespace", "zero-width whitespace*"),
        Known("accepted", "optional/ecmascript-regex", "*\\S matches everything*", "zero-width whitespace*"),
    ],
}
MIN_COMPILED = 190
"""Schemas of the suite that were enforced when this was written; fewer is a loss."""


@cache
def outcomes() -> tuple[Outcome, ...]:
    vocabulary = byte_vocabulary()
    compiler = Compiler(vocabulary)
    return tuple(judge(case, compiler, vocabulary) for case in read_suite())


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
