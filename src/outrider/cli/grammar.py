"""The grammar that the command line asks for, read before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.core.data import Grammar
from outrider.core.errors import GrammarError, SettingError
from outrider.core.files import decoded, reason_of
from outrider.core.params import GrammarKind, grammar_kind
from outrider.core.settings import Structure

MAX_BYTES = 1_000_000
"""Larger schemas and grammars are refused unread; none that people write is nearly as large."""


def read_grammar(settings: Structure) -> Grammar | None:
    """The grammar that the settings ask for; None without one. Raises SettingError for settings that do not
    go together, GrammarError for what cannot be read or is not a grammar."""
    flag = _check(settings)
    if flag is None:
        return None
    kind, text = _kind_and_text(settings)  # what reads grammars loads slowly, and few runs need it
    grammar = Grammar(
        kind=kind,
        text=text,
        style=settings.json_style or "spaced",
        lenient=settings.lenient_schema,
        after=settings.constrain_after,
        fast_forward=settings.fast_forward or "exact",
    )
    from outrider.constraints.sources import lark_source

    try:
        lark_source(grammar)  # what needs no vocabulary is refused before a model is loaded
    except GrammarError as error:
        given = settings.json_schema or settings.grammar
        if given in (None, text):
            raise
        raise GrammarError(f"{error.what} in {given}", error.why, error.way_out) from None
    return grammar


def _check(settings: Structure) -> str | None:
    """The flag that limits the output; None without one. Raises SettingError."""
    kinds = {
        "--json-schema": settings.json_schema is not None,
        "--json-mode": settings.json_mode,
        "--regex": settings.regex is not None,
        "--choice": bool(settings.choices),
        "--grammar": settings.grammar is not None,
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise SettingError(" and ".join(given), "each says what the output may be", "Give one of them.")
    flag = given[0] if given else None
    both = ("--json-schema", "--json-mode")
    belongs: dict[str, tuple[bool, Sequence[str]]] = {
        "--lenient-schema": (settings.lenient_schema, both[:1]),
        "--json-style": (settings.json_style is not None, both),
        "--fast-forward": (settings.fast_forward is not None, [*kinds]),
        "--constrain-after": (settings.constrain_after is not None, [*kinds]),
    }
    for name, (is_given, to) in belongs.items():
        if is_given and flag not in to:
            why = (
                f"{flag} does not use it" if flag else "it says how output is limited, and nothing limits it"
            )
            raise SettingError(name, why, f"Leave it out, or give {' or '.join(to)}.")
    return flag


def _kind_and_text(settings: Structure) -> tuple[GrammarKind, str]:
    if (given := settings.json_schema) is not None:
        is_schema = given.lstrip().startswith("{") or given.strip() in ("true", "false")
        return "json_schema", given if is_schema else _read(given, "schema", "--json-schema")
    if settings.json_mode:
        return "json", ""
    if settings.regex is not None:
        return "regex", settings.regex
    if settings.choices:
        return "choice", json.dumps(settings.choices, ensure_ascii=False)
    given = settings.grammar or ""
    if grammar_kind(given) == "gbnf":  # it has a `::=`, and hardly any path has
        return "gbnf", given
    from outrider.constraints.sources import KINDS

    by_suffix = {kind.suffix: name for name, kind in KINDS.items() if kind.suffix}
    return by_suffix.get(Path(given).suffix, "gbnf"), _read(given, "grammar", "--grammar")


def _read(given: str, what: str, flag: str) -> str:
    if not given.strip():
        raise GrammarError(flag, "it is empty", f"It takes {_FORMS[flag]}.")
    place = f"{what} {given}"
    try:
        with Path(given).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise GrammarError(place, reason_of(error), f"{flag} takes {_FORMS[flag]}.") from error
    if len(data) > MAX_BYTES:
        why = f"it is larger than {MAX_BYTES:,} bytes"
        raise GrammarError(place, why, "Split it, or leave parts of it out.")
    text = decoded(data, place, GrammarError)
    if not text.strip():
        raise GrammarError(place, "it is empty", f"Name a file with a {what}.")
    return text


_FORMS = {
    "--json-schema": "a file, or the schema itself: {…}, true or false",
    "--grammar": "a file, or a GBNF grammar itself: root ::= …",
}
