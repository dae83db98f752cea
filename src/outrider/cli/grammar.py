"""What the output may be, read from the command line before anything is loaded."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from outrider.cli.prompt import encodable
from outrider.core.data import Grammar
from outrider.core.errors import GrammarError, SettingError
from outrider.core.params import FastForward, GrammarKind, JsonStyle

__all__ = ["MAX_BYTES", "GrammarOptions"]

MAX_BYTES = 1_000_000
"""Larger schemas and grammars are refused unread: none that people write comes near it."""

_STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """The options of `outrider.cli.grammar_options` as they came; None and False where they were left out."""

    json_schema: str | None = None
    json_mode: bool = False
    regex: str | None = None
    choices: Sequence[str] | None = None
    source: str | None = None
    style: str | None = None
    fast_forward: str | None = None
    lenient: bool = False
    after: str | None = None

    def read(self, stdin_gives: str | None = None) -> Grammar | None:
        """The grammar that they ask for, its file or standard input read; None for none.

        `stdin_gives` is what standard input is needed for elsewhere. Raises SettingError for options that
        exclude each other, that lack one they belong to or that have an unknown value, GrammarError for
        what cannot be read or is no grammar.
        """
        flag = self._check()
        if flag is None:
            return None
        if stdin_gives is not None and _STDIN in (self.json_schema, self.source):
            why = f"standard input gives {stdin_gives} already"
            raise SettingError(f"{flag} {_STDIN}", why, f"Name a file, or give {stdin_gives} another way.")
        kind, text = self._kind_and_text()
        grammar = Grammar(
            kind=kind,
            text=encodable(text, flag),
            style=cast(JsonStyle, self.style or "spaced"),
            lenient=self.lenient,
            after=self.after,
            fast_forward=cast(FastForward, self.fast_forward or "exact"),
        )
        from outrider.constraints.sources import lark_source  # loads slowly, and few runs need it

        lark_source(grammar)  # what needs no vocabulary is refused before a model is loaded
        return grammar

    def _check(self) -> str | None:
        """The one option that says what the output may be; None where there is none."""
        kinds = {
            "--json-schema": self.json_schema is not None,
            "--json-mode": self.json_mode,
            "--regex": self.regex is not None,
            "--choice": bool(self.choices),
            "--grammar": self.source is not None,
        }
        given = [name for name, is_given in kinds.items() if is_given]
        if len(given) > 1:
            raise SettingError(" and ".join(given), "each says what the output may be", "Give one of them.")
        flag = given[0] if given else None
        _belongs("--lenient-schema", self.lenient, flag, ("--json-schema",))
        _belongs("--json-style", self.style is not None, flag, ("--json-schema", "--json-mode"))
        for name, value in (("--fast-forward", self.fast_forward), ("--constrain-after", self.after)):
            _belongs(name, value is not None, flag, tuple(kinds))
        _known("--json-style", self.style, get_args(JsonStyle))
        _known("--fast-forward", self.fast_forward, get_args(FastForward))
        if self.after == "":
            raise SettingError(
                "--constrain-after", "it is empty", "Leave it out: all of the output is limited."
            )
        encodable(self.after or "", "--constrain-after")
        return flag

    def _kind_and_text(self) -> tuple[GrammarKind, str]:
        if self.json_schema is not None:
            return "json_schema", _schema(self.json_schema)
        if self.json_mode:
            return "json", ""
        if self.regex is not None:
            return "regex", self.regex
        if self.choices:
            return "choice", json.dumps(list(self.choices), ensure_ascii=False)
        return _grammar(self.source or "")


def _belongs(name: str, is_given: bool, flag: str | None, to: tuple[str, ...]) -> None:
    """Refuse an option that has nothing to act on."""
    if not is_given or flag in to:
        return
    why = (
        "it says how output is limited, and nothing limits it" if flag is None else f"{flag} does not use it"
    )
    raise SettingError(name, why, f"Leave it out, or give {' or '.join(to)}.")


def _known(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise SettingError(f"{name} {value}", "it is not known", f"Choose one of {', '.join(known)}.")


def _schema(given: str) -> str:
    """A schema as it stands, or out of its file."""
    start = given.lstrip()
    if start.startswith("{") or start.rstrip() in ("true", "false"):
        return _bounded(given, "--json-schema")
    return _read(given, "schema", "--json-schema")


def _grammar(given: str) -> tuple[GrammarKind, str]:
    """A grammar out of its file, or one as it stands: every GBNF grammar has a `::=`, and hardly a path."""
    if "::=" in given:
        return "gbnf", _bounded(given, "--grammar")
    return "lark" if given.endswith(".lark") else "gbnf", _read(given, "grammar", "--grammar")


def _bounded(text: str, name: str) -> str:
    if len(text) > MAX_BYTES:
        raise _too_large(name)
    return text


def _read(given: str, what: str, flag: str) -> str:
    if not given.strip():
        raise GrammarError(flag, "it is empty", f"It takes {_FORMS[flag]}.")
    name = "standard input" if given == _STDIN else given
    place = f"{what} {name}"
    try:
        if given == _STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(given).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = (getattr(error, "strerror", None) or str(error) or "it cannot be read").lower()
        raise GrammarError(place, reason, f"{flag} takes {_FORMS[flag]}.") from error
    if len(data) > MAX_BYTES:
        raise _too_large(place)
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 (byte {error.start} is {data[error.start]:#04x})"
        raise GrammarError(place, why, "Convert it to UTF-8 first.") from error
    if not text.strip():
        raise GrammarError(place, "it is empty", f"Name a file with a {what}.")
    return text


_FORMS = {
    "--json-schema": "a file, - for standard input, or the schema itself: {…}, true or false",
    "--grammar": "a file, - for standard input, or a GBNF grammar itself: root ::= …",
}


def _too_large(place: str) -> GrammarError:
    return GrammarError(
        place, f"it is larger than {MAX_BYTES:,} bytes", "Split it, or leave parts of it out."
    )
