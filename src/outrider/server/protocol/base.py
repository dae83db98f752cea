"""What all models of requests have in common: unknown fields are named, and so are known ones that are not
supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

_MAX_LEVELS = 250
_MAX_UNKNOWN = 16

_Part = TypeVar("_Part")

Many = Annotated[list[_Part], Field(fail_fast=True)]
"""A list in which the first part that is wrong ends the reading: a body may hold millions of them, and an
error for each would take gigabytes."""


def unsupported(why: str, field: str | None = None) -> PydanticCustomError:
    """An error about something that is known but not supported: `why` with the way out."""
    return PydanticCustomError("unsupported", "{why}", {"why": why, "field": field})


class Shape(BaseModel):
    """A JSON object of a request. `refused` are fields that other servers know and this one does not
    support, with the reason and the way out; null is as if they were not there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for field, why in cls.refused.items():
            if data.get(field) is not None:
                raise unsupported(why, field)
        kept = {key: value for key, value in data.items() if key not in cls.refused}
        if len(kept) <= len(cls.model_fields) + _MAX_UNKNOWN:
            return kept
        # To name one unknown field of a million is enough.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [key for key in kept if key not in known][:_MAX_UNKNOWN]
        return {key: kept[key] for key in kept if key in known} | {key: kept[key] for key in unknown}


class Typed(Shape):
    """An object whose `type` other servers know more values of."""

    types: ClassVar[tuple[str, ...]]
    other_type: ClassVar[str]
    """why other types are not supported, and the way out"""

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in cls.types:
            raise unsupported(cls.other_type.format(kind[:40]), "type")
        return data


class Body(Shape):
    """A whole request: valid Unicode, and nested no deeper than anything that reads it can follow."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        level = [data]
        for _ in range(_MAX_LEVELS):
            level = [value for value in level if isinstance(value, dict | list | str)]
            if not all(_is_unicode(value) for value in level if isinstance(value, str)):
                raise unsupported("half of a surrogate pair is in it. Give valid Unicode")
            level = [part for value in level if not isinstance(value, str) for part in _parts(value)]
            if not level:
                return data
        raise unsupported(f"it is nested deeper than {_MAX_LEVELS} levels. Simplify it")


def _parts(value: dict[Any, Any] | list[Any]) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def explained(why: str) -> WrapValidator:
    """Says `why` a value other than those of the type is not supported; numbers never are."""

    def check(value: Any, handler: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):  # 0 is equal to false
            raise unsupported(why)
        try:
            return handler(value)
        except ValidationError:
            raise unsupported(why) from None

    return WrapValidator(check)


def few(most: int) -> BeforeValidator:
    """Refuses an object of too many fields before it looks at any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            counts: dict[str, Any] = {"number": len(value), "most": most}
            raise PydanticCustomError("too_long", "it has {number} fields, and {most} are the most", counts)
        return value

    return BeforeValidator(check)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""For integers, which JSON may write with a fraction of zero."""
