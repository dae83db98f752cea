"""Grammars of answers that call tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.formats.arguments import arguments_schema
from outrider.formats.data import ToolSpec
from outrider.formats.thought import ThoughtMarkers

MAX_CALLS = 16
"""Of one constrained answer: a small model that may repeat itself does not stop."""

_TO_THE_NAME = r'/((?s:.*)\n)?[ \t]*\{\s*"name"\s*:\s*/'
_FREE = "free: /(?s:.*)/"


@dataclass(slots=True)
class Rules:
    """The rules of one grammar. `control` are the markers that the vocabulary has control tokens for."""

    control: Mapping[str, int]
    lines: list[str] = field(default_factory=lambda: [_FREE])

    def marker(self, text: str) -> str:
        """A marker, as the vocabulary writes it."""
        return f"<[{self.control[text]}]>" if text in self.control else json.dumps(text)

    def up_to(self, text: str) -> str:
        """Any text up to a marker's first occurrence, and the marker."""
        if text in self.control:
            return f"free {self.marker(text)}"
        return self.lazy("/(?s:.*)/", text)

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
        heads = [f"{call_head(tool, key)} {self.arguments(tool)}" for tool in tools]
        return self.named(f'{self.choice(heads)} "}}"')

    def choice(self, alternatives: Sequence[str]) -> str:
        """One of several."""
        return self.named(" | ".join(alternatives))


def call_head(tool: ToolSpec, key: str = "arguments") -> str:
    """The text of a call in JSON up to its arguments."""
    return json.dumps(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')


def repeated(first: str, following: str, most: int) -> str:
    """`first`, and up to `most` - 1 times what follows it."""
    return first if most == 1 else f"{first} ({following}){{0,{most - 1}}}"


def bare_calls(rules: Rules, tools: Sequence[ToolSpec], most: int, *, key: str, separator: str) -> list[str]:
    """Free text that goes over into calls without a marker: a line begins with an object whose first key
    is the name of a tool."""
    following = f"{json.dumps(separator)} {rules.objects(tools, key)}"
    between = json.dumps(f', "{key}": ')
    found = []
    for tool in tools:
        lead = rules.lazy(_TO_THE_NAME, json.dumps(tool.name, ensure_ascii=False))
        found.append(repeated(f'{lead} {between} {rules.arguments(tool)} "}}"', following, most))
    return found


class CallGrammar(Protocol):
    """How a chat format writes calls, as parts of a grammar."""

    def calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> str:
        """One to `most` calls."""
        ...

    def free_calls(self, rules: Rules, tools: Sequence[ToolSpec], most: int) -> list[str]:
        """Alternatives of free text that goes over into calls."""
        ...


def answer_grammar(
    syntax: CallGrammar,
    rules: Rules,
    tools: Sequence[ToolSpec],
    *,
    required: bool,
    most: int,
    thought: ThoughtMarkers | None,
    opened: bool,
) -> str:
    """The grammar of an answer that has to call tools (`required`) or may. With `thought` it may reason
    first; where the prompt `opened` the reasoning, it ends that first."""
    if required:
        answer = rules.named(syntax.calls(rules, tools, most))
    else:
        answer = rules.choice([*syntax.free_calls(rules, tools, most), "free"])
    return "\n".join([f"start: {_with_thought(rules, answer, required, thought, opened)}", *rules.lines, ""])


def _with_thought(
    rules: Rules, answer: str, required: bool, thought: ThoughtMarkers | None, opened: bool
) -> str:
    if thought is None:
        return answer
    gap = rules.named(r"(/[ \n]{1,4}/)?") if required else ""
    behind = f"{rules.up_to(thought.closer)} {gap} {answer}"
    if not required:
        behind = rules.choice([behind, "free"])
    if opened:
        return behind
    control = thought.opener in rules.control
    opener = rules.marker(thought.opener) if control else rules.lazy(r"/\s*/", thought.opener)
    return f"{opener} {behind} | {answer}"
