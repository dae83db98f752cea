"""Grammars of answers that call tools, in llguidance's dialect of Lark, and the schemas in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from outrider.constraints.json_schema import prepare
from outrider.core.errors import GrammarError
from outrider.formats.conversation import ReasoningMarkers, ToolSpec

MAX_CALLS = 16
"""Of one constrained answer: a small model that may repeat itself does not stop."""

_TO_THE_NAME = r'/((?s:.*)\n)?[ \t]*\{\s*"name"\s*:\s*/'
_COMBINED = frozenset(("anyOf", "oneOf", "$ref"))
_SCHEMAS = frozenset(("additionalProperties", "anyOf", "items", "oneOf", "prefixItems"))
_SCHEMA_MAPS = frozenset(("$defs", "definitions", "patternProperties", "properties"))


def arguments_schema(tool: ToolSpec) -> tuple[str, tuple[str, ...]]:
    """The schema as `%json` takes it, and notices about parts that are not enforced.

    Raises GrammarError, which names the tool, where a strict one cannot be enforced.
    """
    try:
        text = json.dumps(tool.parameters)
    except (TypeError, ValueError, RecursionError) as error:
        why = f"the schema of its arguments is no JSON ({error})"
        raise GrammarError(f"tool {tool.name}", why, "Give plain data.") from None
    return _prepared(tool.name, text, tool.strict)


@lru_cache(maxsize=512)
def _prepared(name: str, text: str, strict: bool) -> tuple[str, tuple[str, ...]]:
    try:
        schema, notices = prepare(json.dumps(_object(json.loads(text))), "spaced", lenient=not strict)
    except GrammarError as error:
        if strict:
            way_out = f"{error.way_out} Or leave out strict.".strip()
            raise GrammarError(f"tool {name}", f"{error.what} {error.why}", way_out) from None
        schema, _ = prepare('{"type": "object"}', "spaced", lenient=False)
        why = f"{error.what} {error.why}"
        return schema, (f"tool {name}: {why}; its arguments may be any object",)
    return schema, tuple(f"tool {name}: {notice}" for notice in notices)


def _object(schema: dict[str, Any]) -> Any:
    """The schema, checked to be one of an object, and closed."""
    named = schema.get("type", "object")
    if "object" not in (named if isinstance(named, list) else [named]):
        raise GrammarError("schema", f"#/type is {named!r}, and arguments are an object", "Correct it.")
    typed = {**schema, "type": "object"}
    return typed if '"allOf"' in json.dumps(typed) else closed(typed)


def closed(schema: Any) -> Any:
    """The schema with objects that allow no properties but their own, where it does not say otherwise: a
    model that may write others does not stop. Objects that are combined with others stay as they are."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict) or ("properties" in schema and not _COMBINED.isdisjoint(schema)):
        return schema
    found = schema | {keyword: closed(schema[keyword]) for keyword in _SCHEMAS & schema.keys()}
    for keyword in _SCHEMA_MAPS & schema.keys():
        if isinstance(schema[keyword], dict):
            found[keyword] = {name: closed(part) for name, part in schema[keyword].items()}
    if "properties" in schema:
        found.setdefault("additionalProperties", False)
    return found


@dataclass(slots=True)
class Rules:
    """The rules of one grammar. `control` are the markers that the vocabulary has control tokens for."""

    control: Mapping[str, int]
    lines: list[str] = field(default_factory=lambda: ["free: /(?s:.*)/"])

    def marker(self, text: str) -> str:
        """A marker, as the vocabulary writes it."""
        return f"<[{self.control[text]}]>" if text in self.control else json.dumps(text)

    def up_to(self, text: str) -> str:
        """Any text up to a marker's first occurrence, and the marker."""
        if text in self.control:
            return f"free {self.marker(text)}"
        return self.lazy("/(?s:.*)/", text)

    def opener(self, text: str, *, free: bool) -> str:
        """A marker, `free`: after any text in which it does not occur."""
        return self.up_to(text) if free else self.marker(text)

    def lazy(self, before: str, text: str) -> str:
        """A regular expression and a text, over as soon as the text is complete."""
        return self.named(f"{before} {json.dumps(text)}", "[lazy]")

    def named(self, body: str, flags: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{flags}: {body}")
        return name

    def arguments(self, tool: ToolSpec) -> str:
        """An object that the tool's schema describes. Raises GrammarError where a strict one cannot be
        enforced."""
        return self.named(f"%json {arguments_schema(tool)[0]}")

    def objects(self, tools: Sequence[ToolSpec], key: str = "arguments") -> str:
        """A call of one of the tools in JSON."""
        calls = []
        for tool in tools:
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
            calls.append(f"{json.dumps(head)} {self.arguments(tool)}")
        return self.named(f'{self.choice(calls)} "}}"')

    def choice(self, alternatives: Sequence[str]) -> str:
        """One of several."""
        return self.named(" | ".join(alternatives))


def repeated(first: str, following: str, max_calls: int) -> str:
    """`first`, and up to `max_calls` - 1 times what follows it."""
    return first if max_calls == 1 else f"{first} ({following}){{0,{max_calls - 1}}}"


def bare_calls(
    rules: Rules, tools: Sequence[ToolSpec], max_calls: int, *, key: str, separator: str
) -> list[str]:
    """Free text that goes over into calls without a marker: a line begins with an object whose first key
    is the name of a tool."""
    following = f"{json.dumps(separator)} {rules.objects(tools, key)}"
    between = json.dumps(f', "{key}": ')
    found = []
    for tool in tools:
        prefix = rules.lazy(_TO_THE_NAME, json.dumps(tool.name, ensure_ascii=False))
        found.append(repeated(f'{prefix} {between} {rules.arguments(tool)} "}}"', following, max_calls))
    return found


def answer_grammar(
    rules: Rules, answer: str, *, required: bool, reasoning: ReasoningMarkers | None, opened: bool
) -> str:
    """The grammar of an answer that has to call tools (`required`) or may, as `answer` says. With
    `reasoning` it may reason first; where the prompt `opened` the reasoning, it ends that first."""
    if reasoning is not None:
        gap = rules.named(r"(/[ \n]{1,4}/)?") if required else ""
        after = f"{rules.up_to(reasoning.closer)} {gap} {answer}"
        if not required:
            after = rules.choice([after, "free"])
        if not opened:
            is_token = reasoning.opener in rules.control
            opener = rules.marker(reasoning.opener) if is_token else rules.lazy(r"/\s*/", reasoning.opener)
            after = f"{opener} {after} | {answer}"
        answer = after
    return "\n".join([f"start: {answer}", *rules.lines, ""])
