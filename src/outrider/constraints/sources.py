"""Grammars of all kinds as sources in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llguidance import regex_to_lark

from outrider.constraints.gbnf import gbnf_to_lark
from outrider.constraints.json_schema import prepare, writing_options
from outrider.constraints.json_schema.merging import check_merging
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError
from outrider.core.params import GrammarKind

MAX_CHARACTERS = 1_000_000
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")

NAMES: dict[GrammarKind, str] = {
    "json_schema": "schema",
    "json": "JSON",
    "regex": "regular expression",
    "choice": "choice",
    "gbnf": "grammar",
    "lark": "grammar",
}
"""What the kinds are called in errors."""


def lark_source(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    """The grammar with `start` as its first rule, and notices of what it does not enforce. Raises
    GrammarError."""
    name = NAMES[grammar.kind]
    if len(grammar.text) > MAX_CHARACTERS:
        why = f"it has {len(grammar.text):,} characters, {MAX_CHARACTERS:,} are the most"
        raise GrammarError(name, why, "Shorten it.")
    _check_unicode(name, grammar.text)
    return _SOURCES[grammar.kind](grammar)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(name, "it holds half of a surrogate pair", "Give valid Unicode.") from None


def _schema(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    text = "{}" if grammar.kind == "json" else grammar.text
    schema, notices = prepare(text, writing_options(grammar.style), lenient=grammar.lenient)
    return f"start: %json {schema}\n", notices


def _regex(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    backslashes = len(grammar.text) - len(grammar.text.rstrip("\\"))
    if backslashes % 2:
        raise GrammarError("regular expression", "it ends in a backslash", "Write two for one.")
    # Digits and blanks of ASCII: Rust's \d and \s take those of every script.
    return f"start: TEXT\nTEXT: /{regex_to_lark(grammar.text, 'ds')}/\n", ()


def _choice(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        why = "it is not a list of texts in JSON"
        raise GrammarError("choice", why, 'Give something like ["yes", "no"].')
    if not any(choices):
        raise GrammarError("choice", "there is nothing to choose from", "Give at least one text.")
    _check_unicode("choice", "".join(choices))
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}\n", ()


def _gbnf(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    return gbnf_to_lark(grammar.text), ()


def _lark(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    for match in _INLINE_SCHEMA.finditer(grammar.text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar.text, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler complains, with the place
        if isinstance(schema, dict):
            check_merging(schema)
    return f"{grammar.text}\n", ()


_SOURCES: dict[GrammarKind, Callable[[Grammar], tuple[str, tuple[str, ...]]]] = {
    "json_schema": _schema,
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "gbnf": _gbnf,
    "lark": _lark,
}
