"""What is asked for: a prompt and what its answer is limited to, and whether an answer keeps to it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from harness import read_rows
from outrider.core.data import Grammar
from outrider.core.params import GrammarKind, JsonStyle

CASES = Path(__file__).with_name("cases.jsonl")
GROUPS = ("tool", "record", "nested", "other")
_KINDS: tuple[GrammarKind, ...] = ("json_schema", "json", "regex", "choice", "gbnf")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of cases.jsonl: `limit` is its schema, expression, choices or grammar, `check` a regular
    expression that a text of a grammar has to match, since no independent reader of grammars is at hand."""

    id: str
    group: str
    prompt: str
    kind: GrammarKind
    limit: Any
    check: str = ""

    def grammar(self, style: JsonStyle = "spaced") -> Grammar:
        as_json = self.kind in ("json_schema", "choice")
        return Grammar(self.kind, json.dumps(self.limit) if as_json else self.limit, style)

    def complaint(self, text: str) -> str | None:
        """Why a finished text is not what was asked for; None where it is. Judged without any code of
        the project's: by json, jsonschema (formats included) and re."""
        if self.kind in ("json_schema", "json"):
            return _json_complaint(text, self.limit if self.kind == "json_schema" else True)
        if self.kind == "choice":
            return None if text in self.limit else "none of the choices"
        expression = self.limit if self.kind == "regex" else self.check
        return None if re.fullmatch(expression, text) else f"not matched by {expression}"


def _json_complaint(text: str, schema: Any) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    found = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return None if found is None else f"{found.json_path}: {found.message}"[:300]


def load_cases(path: Path = CASES, names: Sequence[str] = ()) -> list[Case]:
    """The cases of a file; with `names` those whose id or group begins with one of them. Ends the
    program, naming the line, where a row is none."""
    cases = list(_read(path))
    chosen = [c for c in cases if not names or c.group in names or c.id.startswith(tuple(names))]
    if not chosen:
        sys.exit(f"{path} has no case {' or '.join(names)}: its groups are {', '.join(GROUPS)}")
    return chosen


def _read(path: Path) -> Iterator[Case]:
    seen = set()
    for number, row in enumerate(read_rows(path), 1):
        kinds = [kind for kind in _KINDS if kind in row]
        if len(kinds) != 1 or row.get("kind") not in GROUPS or not {"id", "prompt"} <= row.keys():
            sys.exit(f"{path}, line {number} is no case: id, kind, prompt and one of {', '.join(_KINDS)}")
        if row["id"] in seen:
            sys.exit(f"{path}, line {number}: there is another case {row['id']}")
        seen.add(row["id"])
        yield Case(row["id"], row["kind"], row["prompt"], kinds[0], row[kinds[0]], row.get("check", ""))
