"""Grammars of all kinds as sources in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from llguidance import regex_to_lark

from outrider.constraints.gbnf import gbnf_to_lark
from outrider.constraints.json_schema import check_merging, prepare
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError

MAX_CHARACTERS = 1_000_000
_INLINE_SCHEMA = re.compile(r"%json\s*(?=\{)")


def lark_source(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    """The grammar with `start` as its first rule, and notices of what it does not enforce. Raises
    GrammarError."""
    kind = KINDS.get(grammar.kind)
    if kind is None:
        way_out = f"Choose one of {', '.join(KINDS)}."
        raise GrammarError("grammar", f"its kind {grammar.kind} is not known", way_out)
    if len(grammar.text) > MAX_CHARACTERS:
        why = f"it has {len(grammar.text):,} characters, {MAX_CHARACTERS:,} are the most"
        raise GrammarError(kind.title, why, "Shorten it.")
    _check_unicode(kind.title, grammar.text)
    return kind.to_lark(grammar)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(name, "it holds half of a surrogate pair", "Give valid Unicode.") from None


def _schema(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    text = "{}" if grammar.kind == "json" else grammar.text
    schema, notices = prepare(text, grammar.style, lenient=grammar.lenient)
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


def _lark(grammar: Grammar) -> tuple[str, tuple[str, ...]]:
    for match in _INLINE_SCHEMA.finditer(grammar.text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar.text, match.end())
        except (ValueError, RecursionError):
            continue  # the compiler complains, with the place
        if isinstance(schema, dict):
            check_merging(schema)
    return f"{grammar.text}\n", ()


class Kind(NamedTuple):
    """A kind of grammar: what errors call it, what readouts call a text of it, and what makes its source in
    llguidance's Lark (`start` first) with notices, or raises GrammarError. `--grammar` takes files that
    end in `suffix` for it."""

    title: str
    texts: str
    to_lark: Callable[[Grammar], tuple[str, tuple[str, ...]]]
    suffix: str | None = None


KINDS: dict[str, Kind] = {
    "json_schema": Kind("schema", "JSON of a schema", _schema),
    "json": Kind("JSON", "JSON", _schema),
    "regex": Kind("regular expression", "text of a pattern", _regex),
    "choice": Kind("choice", "one of several texts", _choice),
    "gbnf": Kind("grammar", "text of a GBNF grammar", lambda it: (gbnf_to_lark(it.text), ()), ".gbnf"),
    "lark": Kind("grammar", "text of a Lark grammar", _lark, ".lark"),
}
"""Every kind, by its name in `Grammar.kind`."""
