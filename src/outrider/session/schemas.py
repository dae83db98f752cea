"""What a caller may give as a schema, and how the answer is turned back into an object of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from outrider.core.contracts import Vocabulary
from outrider.core.data import Completion, Grammar
from outrider.core.errors import GrammarError


@runtime_checkable
class SchemaModel(Protocol):
    """A class that knows its JSON schema and can be made of JSON text: Pydantic's models, for one."""

    def model_json_schema(self) -> dict[str, Any]:
        """The schema, as plain data."""

    def model_validate_json(self, json_data: str) -> Any:
        """An object of the class."""


Schema = type[Any] | Mapping[str, Any] | str
"""A Pydantic model, a JSON schema as plain data, or its text."""


def read_schema(schema: Schema) -> tuple[str, Callable[[str], Any]]:
    """The text of a schema, and what parses an answer that fulfils it. The objects of a Pydantic model
    have the fields of the model and, unless it allows more itself, no others.

    Raises GrammarError for anything else, and for a schema that JSON cannot hold.
    """
    if isinstance(schema, str):
        return schema, json.loads
    if isinstance(schema, SchemaModel):
        from outrider.formats.grammar import closed  # loads slowly, and few requests need it

        model = cast(SchemaModel, schema)
        return json.dumps(closed(model.model_json_schema())), model.model_validate_json
    if not isinstance(schema, Mapping):
        why = f"{schema!r} is neither a Pydantic model nor a JSON schema"
        raise GrammarError("schema", why, "Give a class with model_json_schema(), a mapping or JSON text.")
    try:
        return json.dumps(schema), json.loads
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError("schema", f"JSON cannot hold it ({error})", "Give plain data.") from None


def parser_of(
    grammar: Grammar, vocabulary: Vocabulary, parse: Callable[[str], Any]
) -> Callable[[Completion], Any]:
    """What parses an answer under a grammar of the schema: the whole text, or what follows the grammar's
    `after`; an answer without that, where it is optional, gives None."""

    def parse_completion(completion: Completion) -> Any:
        if grammar.after is None:
            return parse(completion.text)
        spelled = b""
        for token in completion.tokens:
            if not vocabulary.ends_generation(token):  # control tokens show no text, but have a spelling
                is_control = vocabulary.is_control(token)
                spelled += vocabulary.spelling(token) if is_control else vocabulary.piece(token)
        _, trigger, answer = spelled.partition(grammar.after.encode())
        return parse(answer.decode()) if trigger else None

    return parse_completion
