"""What a caller may give as a schema, and how the answer is turned back into an object of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from outrider.core.errors import GrammarError

__all__ = ["Schema", "SchemaModel", "read_schema"]


@runtime_checkable
class SchemaModel(Protocol):
    """A class that knows its JSON schema and can be made of JSON text: Pydantic's models, for one."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema, as plain data."""
        ...

    def model_validate_json(self, json_data: str) -> Any:
        """An object of the class."""
        ...


Schema = type[Any] | Mapping[str, Any] | str
"""A Pydantic model, a JSON schema as plain data, or its text."""


def read_schema(schema: Schema) -> tuple[str, Callable[[str], Any]]:
    """The text of a schema, and what parses an answer that fulfils it.

    Raises GrammarError for anything else, and for a schema that JSON cannot hold.
    """
    if isinstance(schema, str):
        return schema, json.loads
    if isinstance(schema, SchemaModel):
        model = cast(SchemaModel, schema)
        return json.dumps(model.model_json_schema()), model.model_validate_json
    if not isinstance(schema, Mapping):
        why = f"{schema!r} is neither a Pydantic model nor a JSON schema"
        raise GrammarError("schema", why, "Give a class with model_json_schema(), a mapping or JSON text.")
    try:
        return json.dumps(schema), json.loads
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError("schema", f"JSON cannot hold it ({error})", "Give plain data.") from None
