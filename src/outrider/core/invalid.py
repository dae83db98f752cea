"""What pydantic found wrong with a value, in one plain line: where it is, and why it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

_ACCEPTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dataclass_type": "an object",
    "dict_type": "an object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "list_type": "an array",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "path_type": "a path",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} character",
    "string_type": "text",
    "too_long": "an array of at most {max_length} entries",
    "too_short": "an array of at least {min_length} entry",
    "tuple_type": "an array",
    "union_tag_invalid": "{expected_tags}",
}
"""What a value may be, by the type of pydantic's error."""
_ALTERNATIVES = {"bool", "float", "int", "str"}
"""Types in the place of an error, which pydantic adds where a field takes several."""
_PREFIX = "Value error, "


@dataclass(frozen=True, slots=True)
class Invalid:
    """The first thing that is wrong. `place` are the names and indices (from 0) that lead to it, `given` is
    the value there, `kind` pydantic's name of the error, `reason` one sentence without a full stop."""

    place: tuple[str | int, ...]
    given: Any
    kind: str
    reason: str

    @property
    def path(self) -> str:
        """The place as people count: "workloads[2].prompts" is the second workload's; empty for the whole."""
        parts = (f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in self.place)
        return "".join(parts).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.place else self.reason


def invalid(error: ValidationError) -> Invalid:
    """What the error says first; of several alternatives of a field, what each would have taken."""
    errors = error.errors(include_url=False)
    first = errors[0]
    place = _place(first)
    beside = [found for found in errors if _place(found) == place]
    return Invalid(place, first["input"], first["type"], _reason(first, beside))


def accepted(errors: Sequence[Mapping[str, Any]]) -> str:
    """What each of the alternatives of a field would have taken, in words; empty where none is known."""
    found = []
    for error in errors:
        if (words := _ACCEPTED.get(error["type"])) is not None:
            context = (error.get("ctx") or {}).items()
            plain = {
                key: f"{value:g}" if isinstance(value, float) else str(value).replace("'", '"')
                for key, value in context
            }
            found.append(words.format(**plain))
    return " or ".join(dict.fromkeys(found))


def _reason(first: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> str:
    message = str(first["msg"])
    if first["type"] == "missing":
        return "it is missing"
    if first["type"] == "extra_forbidden":
        return "it is not known"
    if first["type"] == "json_invalid":
        return "it is no JSON"
    if message.startswith(_PREFIX):
        message = message.removeprefix(_PREFIX)
    elif words := accepted(beside):
        return f"it has to be {words}"
    [line, *_] = message.splitlines() or [""]
    return line[:1].lower() + line[1:]


def _place(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    place = [part for part in error["loc"] if isinstance(part, int) or part.isidentifier()]
    while len(place) > 1 and place[-1] in _ALTERNATIVES:
        place.pop()
    return tuple(place)
