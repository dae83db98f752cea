"""Grammars of answers that call tools, in llguidance's dialect of Lark, and the schemas in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from outrider.constraints.json_schema import closed, prepare
from outrider.core.errors import GrammarError
from outrider.core.notices import notify


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object; empty:
    any object. A schema that cannot be enforced is an error where the tool is `strict`; otherwise what can be
    of it is, and a notice says so."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """The choice of one tool, which has to be called."""

    name: str


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


Written = Callable[[Sequence[Call]], str]
"""How a model writes calls."""

ToolChoice = Literal["none", "auto", "required"] | Named


class ReasoningMarkers(NamedTuple):
    """How reasoning begins and ends."""

    opener: str
    closer: str


NUMBER, ID, BLANK = "{number}", "{id}", "{blank}"
"""Where a call has a number (short: small models do not end a long one) or an id, or may have a blank."""
_PLACEHOLDERS = {NUMBER: "/[0-9]{1,3}/", ID: "/[a-zA-Z0-9]{9}/", BLANK: '(" ")?'}
MARKER = re.compile(r'<[^<>\s="]+>|\[[A-Z_]+\]')
"""What may be a control token."""
MAX_CALLS = 16
"""Of one constrained answer: a small model that may repeat itself does not stop."""


@lru_cache(maxsize=512)
def _prepared(name: str, text: str, strict: bool, place: str) -> tuple[str, tuple[str, ...]]:
    """A schema as `%json` takes it, and notices about parts that are not enforced. `place` says what of the
    tool it is of; empty: its arguments, an object. Raises GrammarError about a strict tool."""
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
    """The rules of one grammar. `control` are the markers that the vocabulary has control tokens for."""

    control: Mapping[str, int]
    lines: list[str] = field(default_factory=lambda: ["free: /(?s:.*)/"])

    def marker(self, text: str) -> str:
        """A text as the vocabulary writes it, placeholders included."""
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        known = _PLACEHOLDERS | {name: f"<[{token}]>" for name, token in self.control.items()}
        parts = re.split(f"({'|'.join(map(re.escape, known))})", text)
        return [known.get(part) or json.dumps(part) for part in parts if part]

    def text_up_to(self, pattern: str, tag: str) -> str:
        """A text of that pattern up to the first occurrence of a tag, and the tag."""
        if tag in self.control:
            return f"{self.named(pattern)} {self.marker(tag)}"
        return self.named(f"{pattern} {json.dumps(tag)}", "[lazy]")

    def opener(self, text: str, *, free: bool) -> str:
        """A text with markers, `free`: after any text in which its trigger does not occur."""
        if not free:
            return self.marker(text)
        head, *others = self._parts(text)
        if head.startswith("<["):
            return " ".join(["free", head, *others])
        trigger, rest = split_trigger(json.loads(head))
        first = self.text_up_to("/(?s:.*)/", trigger)
        return " ".join([first, *([json.dumps(rest)] if rest else []), *others])

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
        prepared, notices = _prepared(tool.name, json.dumps(schema), tool.strict, place)
        notify(*notices)
        return self.named(f"%json {prepared}")

    def leave_out(self, tool: ToolSpec, name: str, keywords: Sequence[str]) -> None:
        """Say that keywords of a parameter's schema are not enforced. Raises GrammarError where the tool is
        strict."""
        why = "cannot be enforced where text is written without quotes"
        for keyword in keywords:
            if tool.strict:
                raise GrammarError(f"tool {tool.name}", f"{name}: {keyword} {why}", "Leave out strict.")
            notify(f"tool {tool.name}: {name}: {keyword} {why}")

    def choice(self, alternatives: Sequence[str]) -> str:
        """One of several."""
        return self.named(" | ".join(alternatives))


def split_trigger(text: str) -> tuple[str, str]:
    """What of an opener makes it certain that a call begins, a marker or a line, and the rest."""
    found = MARKER.match(text)
    trigger = found[0] if found else text.partition("\n")[0]
    return trigger, text.removeprefix(trigger)


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
