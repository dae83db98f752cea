"""What every request's shape has in common: unknown fields are named, and so are known ones that are not
supported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["WHOLE", "Body", "Shape", "explained", "unsupported"]

_MOST_LEVELS = 250


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
        return {key: value for key, value in data.items() if key not in cls.refused}


class Body(Shape):
    """A whole request: valid Unicode, and nested no deeper than anything that reads it can follow."""

    @model_validator(mode="before")
    @classmethod
    def _is_readable(cls, data: Any) -> Any:
        level = [data]
        for _ in range(_MOST_LEVELS):
            level = [value for value in level if isinstance(value, dict | list | str)]
            if not all(_is_unicode(value) for value in level if isinstance(value, str)):
                raise unsupported("half of a surrogate pair is in it. Give valid Unicode")
            level = [part for value in level if not isinstance(value, str) for part in _parts(value)]
            if not level:
                return data
        raise unsupported(f"it is nested deeper than {_MOST_LEVELS} levels. Simplify it")


def _parts(value: dict[Any, Any] | list[Any]) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else value


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def explained(why: str) -> WrapValidator:
    """Says `why` a value other than those of the type is not supported."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise unsupported(why) from None

    return WrapValidator(check)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""For integers, which JSON may write with a fraction of zero."""
