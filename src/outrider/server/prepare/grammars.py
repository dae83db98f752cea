"""The one thing that limits an answer, whichever server's field it came in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.core.data import Grammar
from outrider.core.params import FastForward, GrammarKind
from outrider.server.prepare.settings import Limits
from outrider.server.problems import wrong
from outrider.server.shapes.grammars import (
    GrammarFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)

__all__ = ["grammar_of"]

Found = tuple[str, Grammar]
"""The field, and what it asks for."""

_OBJECT = '{"type": "object"}'


def grammar_of(
    fields: GrammarFields, fast_forward: FastForward, limits: Limits
) -> tuple[Grammar | None, str]:
    """What limits the answer, and the field that says so; None and "" where nothing does.

    Raises Problem for two of them, and for a text that is too long.
    """
    found = [(name, grammar) for name, grammar in _all(fields, fast_forward) if grammar is not None]
    if not found:
        return None, ""
    name, grammar = found[0]
    if len(found) > 1:
        why = f"the answer is limited by {name} already. Leave one of them out."
        raise wrong(found[1][0], why)
    limits.check_schema(len(grammar.text.encode("utf-8", errors="surrogatepass")), name)
    return grammar, name


def _all(fields: GrammarFields, forward: FastForward) -> Iterator[tuple[str, Grammar | None]]:
    asked = fields.response_format
    if isinstance(asked, JsonObjectFormat):
        schema = asked.json_schema
        text = _OBJECT if schema is None else _text(schema)
        yield "response_format", _made("json_schema", text, forward)
    elif isinstance(asked, JsonSchemaFormat):
        named = asked.json_schema
        text = _text(named.json_schema)
        yield "response_format", _made("json_schema", text, forward, lenient=named.strict is False)
    if fields.json_schema is not None:
        yield "json_schema", _made("json_schema", _text(fields.json_schema), forward)
    if fields.grammar is not None:
        yield "grammar", _made(_kind(fields.grammar), fields.grammar, forward)
    if fields.structured_outputs is not None:
        yield from _structured(fields.structured_outputs, forward)
    if fields.guided_json is not None:
        yield "guided_json", _made("json_schema", _text(fields.guided_json), forward)
    if fields.guided_regex is not None:
        yield "guided_regex", _made("regex", fields.guided_regex, forward)
    if fields.guided_choice is not None:
        yield "guided_choice", _made("choice", json.dumps(fields.guided_choice), forward)
    if fields.guided_grammar is not None:
        yield "guided_grammar", _made(_kind(fields.guided_grammar), fields.guided_grammar, forward)


def _structured(asked: StructuredOutputs, forward: FastForward) -> Iterator[Found]:
    path, compact = "structured_outputs", bool(asked.disable_any_whitespace)
    num_found = 0
    for name, kind, text in (
        (
            "json",
            "json_schema",
            None if asked.json_schema is None else _text(asked.json_schema),
        ),
        ("regex", "regex", asked.regex),
        ("choice", "choice", None if asked.choice is None else json.dumps(asked.choice)),
        ("grammar", _kind(asked.grammar or ""), asked.grammar),
        ("json_object", "json_schema", _OBJECT if asked.json_object else None),
    ):
        if text is not None:
            num_found += 1
            yield f"{path}.{name}", _made(kind, text, forward, compact=compact)  # type: ignore[arg-type]
    if not num_found:
        why = "it asks for nothing. Give json, regex, choice, grammar or json_object."
        raise wrong(path, why)


def _made(
    kind: GrammarKind, text: str, forward: FastForward, *, lenient: bool = False, compact: bool = False
) -> Grammar:
    style = "compact" if compact and kind == "json_schema" else "spaced"
    return Grammar(kind, text, style=style, lenient=lenient, fast_forward=forward)  # type: ignore[arg-type]


def _kind(grammar: str) -> GrammarKind:
    return "gbnf" if "::=" in grammar else "lark"


def _text(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
