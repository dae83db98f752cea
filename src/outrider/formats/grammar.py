"""Grammars of answers that call tools, in llguidance's dialect of Lark, and the schemas in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from outrider.constraints.json_schema import closed, prepare
from outrider.core.errors import GrammarError
from outrider.formats.conversation import ReasoningMarkers, ToolSpec

NUMBER = "{number}"
"""Where a call is numbered. It is short: a small model does not end a long one."""
MAX_CALLS = 16
"""Of one constrained answer: a small model that may repeat itself does not stop."""


def _schema_of(tool: ToolSpec, schema: Any, place: str) -> tuple[str, tuple[str, ...]]:
    """A schema as `%json` takes it, and notices about parts that are not enforced. `place` says what of the
    tool it is of; empty: its arguments, an object.

    Raises GrammarError, which names the tool, where that of a strict one cannot be enforced.
    """
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the schema of its arguments is not JSON ({error})"
        raise GrammarError(f"tool {tool.name}", why, "Give plain data.") from None
    return _prepared(tool.name, text, tool.strict, place)


@lru_cache(maxsize=512)
def _prepared(name: str, text: str, strict: bool, place: str) -> tuple[str, tuple[str, ...]]:
    try:
        schema = json.loads(text)
        schema = closed(schema) if place else _object(schema)
        prepared, notices = prepare(json.dumps(schema), "spaced", lenient=not strict)
    except GrammarError as error:
        if strict:
            way_out = f"{error.way_out} Or leave out strict.".strip()
            raise GrammarError(f"tool {name}", f"{error.what} {error.why}", way_out) from None
        prepared, _ = prepare("{}" if place else '{"type": "object"}', "spaced", lenient=False)
        what = f"{place or 'its arguments'} may be any {'value' if place else 'object'}"
        return prepared, (f"tool {name}: {error.what} {error.why}; {what}",)
    return prepared, tuple(f"tool {name}: {place and place + ': '}{notice}" for notice in notices)


def _object(schema: dict[str, Any]) -> Any:
    """The schema, checked to be one of an object, and closed."""
    named = schema.get("type", "object")
    if "object" not in (named if isinstance(named, list) else [named]):
        raise GrammarError("schema", f"#/type is {named!r}, and arguments are an object", "Correct it.")
    typed = {**schema, "type": "object"}
    return typed if '"allOf"' in json.dumps(typed) else closed(typed)


@dataclass(slots=True)
class Rules:
    """The rules of one grammar. `control` are the markers that the vocabulary has control tokens for,
    `notices` what of the tools' schemas is not enforced."""

    control: Mapping[str, int]
    lines: list[str] = field(default_factory=lambda: ["free: /(?s:.*)/"])
    notices: list[str] = field(default_factory=list)

    def marker(self, text: str) -> str:
        """A text as the vocabulary writes it, with `NUMBER` for any number of a call."""
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        special = "|".join(map(re.escape, [*self.control, NUMBER]))
        parts = filter(None, re.split(f"({special})", text))
        known = {NUMBER: "/[0-9]{1,3}/", **{name: f"<[{i}]>" for name, i in self.control.items()}}
        return [known.get(part) or json.dumps(part) for part in parts]

    def text_up_to(self, pattern: str, tag: str) -> str:
        """A text of that pattern up to the first occurrence of a tag, and the tag."""
        if tag in self.control:
            return f"{self.named(pattern)} {self.marker(tag)}"
        return self.named(f"{pattern} {json.dumps(tag)}", "[lazy]")

    def opener(self, text: str, *, free: bool) -> str:
        """A text with markers, `free`: after any text in which its beginning does not occur. That is its
        first line, or what comes before the first control token."""
        if not free:
            return self.marker(text)
        head, *others = self._parts(text)
        if head.startswith("<["):
            return " ".join(["free", head, *others])
        line, newline, rest = str(json.loads(head)).partition("\n")
        first = self.text_up_to("/(?s:.*)/", line)
        return " ".join([first, *([json.dumps(newline + rest)] if newline else []), *others])

    def named(self, body: str, flags: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{flags}: {body}")
        return name

    def arguments(self, tool: ToolSpec) -> str:
        """An object that the tool's schema describes. Raises GrammarError where a strict one cannot be
        enforced."""
        return self.value(tool, tool.parameters, "")

    def value(self, tool: ToolSpec, schema: Any, place: str) -> str:
        """A value of what of the tool is at a place, likewise."""
        prepared, notices = _schema_of(tool, schema, place)
        self.notices += notices
        return self.named(f"%json {prepared}")

    def leave_out(self, tool: ToolSpec, name: str, keywords: Sequence[str]) -> None:
        """Say that keywords of a parameter's schema are not enforced. Raises GrammarError where the tool is
        strict."""
        why = "cannot be enforced where text is written without quotes"
        for keyword in keywords:
            if tool.strict:
                raise GrammarError(f"tool {tool.name}", f"{name}: {keyword} {why}", "Leave out strict.")
            self.notices.append(f"tool {tool.name}: {name}: {keyword} {why}")

    def choice(self, alternatives: Sequence[str]) -> str:
        """One of several."""
        return self.named(" | ".join(alternatives))


def repeated(first: str, following: str, max_calls: int) -> str:
    """`first`, and up to `max_calls` - 1 times what follows it."""
    return first if max_calls == 1 else f"{first} ({following}){{0,{max_calls - 1}}}"


def answer_grammar(
    rules: Rules,
    calls: Sequence[str],
    content: str | None,
    *,
    reasoning: ReasoningMarkers | None,
    opened: bool,
) -> str:
    """The grammar of an answer that calls tools or is `content`, a part of a grammar; None: it has to
    call tools. With `reasoning` it may reason first; where the prompt `opened` the reasoning, it ends that
    first."""
    answer = rules.choice(calls if content is None else [*calls, content])
    if reasoning is not None:
        gap = "" if content == "free" else rules.named(r"(/[ \n]{1,4}/)?")
        after = f"{rules.opener(reasoning.closer, free=True)} {gap} {answer}"
        if content == "free":
            after = rules.choice([after, "free"])
        if not opened:
            is_token = reasoning.opener in rules.control
            opener = reasoning.opener
            begun = rules.marker(opener) if is_token else rules.text_up_to(r"/\s*/", opener)
            after = f"{begun} {after} | {answer}"
        answer = after
    return "\n".join([f"start: {answer}", *rules.lines, ""])
