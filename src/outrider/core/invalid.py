"""Pydantic's errors in one line: the place, and the reason in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

_ALTERNATIVES = {"bool", "float", "int", "str"}
"""Type names that pydantic adds to the place of an error if a field takes several types."""
_REASONS = {
    "missing": "it is missing",
    "extra_forbidden": "it is not known",
    "json_invalid": "it is not valid JSON",
}
_ACCEPTED = re.compile(
    r"Input should be (?P<value>.+?)(?: or (?:instance|object) .*|, (?:unable|got|but) .*)?"
    r"|Input tag .* expected tags: (?P<tags>.+)"
    r"|Input is not (?P<path>a valid path) .*"
    r"|(?P<kind>\w+) should (?:have|match) (?P<size>.+?)(?: after .*)?"
)
"""Pydantic's messages that say what is accepted"""
_PLAIN = (
    (r"greater than or equal to (\S+)", r"\1 or more"),
    (r"less than or equal to (\S+)", r"\1 or less"),
    ("greater than", "more than"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "a whole number"),
    ("a valid string", "text"),
    ("a valid (list|tuple)", "an array"),
    ("a valid dictionary", "an object"),
    ("a valid ", "a "),
    ("'", '"'),
)
"""Pydantic's words, and those of people who do not know Python"""
_SIZED = {"String": "text", "List": "an array", "Tuple": "an array", "Dictionary": "an object"}


@dataclass(frozen=True, slots=True)
class Invalid:
    """The first error: the names and indices (from 0) that lead to it, and the reason without a full stop."""

    place: tuple[str | int, ...]
    reason: str

    def __str__(self) -> str:
        """With the place as people count: "workloads[2].prompts" is the second workload's."""
        parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in self.place)
        path = "".join(parts).removeprefix(".")
        return f"{path}: {self.reason}" if path else self.reason


def invalid(error: ValidationError) -> Invalid:
    """The first error; of a field that takes several types, what each would have accepted."""
    errors = error.errors(include_url=False)
    first = errors[0]
    place = _place(first)
    beside = [found for found in errors if _place(found) == place]
    return Invalid(place, _reason(first, beside))


def accepted(errors: Sequence[Mapping[str, Any]]) -> str:
    """What each alternative of a field would have accepted; empty if unknown."""
    found = []
    for error in errors:
        if match := _ACCEPTED.fullmatch(str(error["msg"])):
            words = match["value"] or match["tags"] or match["path"] or match["size"]
            for theirs, ours in _PLAIN:
                words = re.sub(theirs, ours, words)
            found.append(f"{_SIZED.get(match['kind'], 'a value')} with {words}" if match["kind"] else words)
    return " or ".join(dict.fromkeys(found))


def _reason(first: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> str:
    if first["type"] in _REASONS:
        return _REASONS[first["type"]]
    if words := accepted(beside):
        return f"it has to be {words}"
    [line, *_] = str(first["msg"]).removeprefix("Value error, ").splitlines() or [""]
    return line[:1].lower() + line[1:]


def _place(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    place = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    while len(place) > 1 and place[-1] in _ALTERNATIVES:
        place.pop()
    return tuple(place)
