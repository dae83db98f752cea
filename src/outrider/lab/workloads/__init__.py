"""A workload from its file: the lines that hold prompts, those of the categories asked for, evenly spread.

A line has Spec-Bench's shape, a chat request's or a text's, or is an event of a server's log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.core.files import parse_json, read_text
from outrider.core.invalid import invalid
from outrider.core.params import SamplingParams, grammar_kind
from outrider.lab.prompts import Prompt, Workload

_FORMS = 'Each line is {"turns": […]}, {"messages": […]}, {"prompt": "…"} or an event of a server\'s log.'

_KNOWN = ("messages", "prompt", "text", "turns", "tools", "response_format", "max_tokens", "category")
_ALIKE = 0.85
_OBJECT = {"type": "object"}

BUILT_IN: tuple[str, ...] = ("chat", "code", "edits", "json", "summaries", "agent", "reasoning")
"""Their names; the prompts of each are in the file of that name beside this module."""

MAX_TOKENS = 128
"""of an answer, where nothing else is said"""


def load_workload(
    reference: str,
    *,
    prompts: int | None = None,
    temperature: float = 0.0,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> Workload:
    """The prompts of a workload, each with an id of its own, and how they are answered.

    Raises PromptError, which names the file and the line.

    Args:
        reference: One of BUILT_IN or a JSON-lines file; "file.jsonl#coding,math" takes these categories.
        prompts: At most so many, evenly spread over the file; None: all.
        temperature: Of the answers.
        max_tokens: Of an answer, where its prompt does not say.
        seed: Of the sampling.
    """
    if reference in BUILT_IN:
        what, source, name, wanted = f"the built-in workload {reference}", "built in", reference, ""
        text = (files("outrider.lab.workloads") / f"{reference}.jsonl").read_text(encoding="utf-8")
    else:
        path, wanted = Path(reference).expanduser(), ""
        if not path.exists() and "#" in reference:
            name, _, wanted = reference.rpartition("#")
            path = Path(name).expanduser()
        way_out = f"Name a JSON-lines file, or a built-in workload: {', '.join(BUILT_IN)}."
        text, what, source = read_text(path, way_out, PromptError), str(path), str(path)
        name = f"{path.stem} {wanted}".strip()
    read, passed_over = _read(text, what, max_tokens)
    found = _of_categories(read, [part.strip() for part in wanted.split(",") if part.strip()], what)
    if prompts is not None and prompts < len(found):  # from the first on at even distances
        found = [found[i * len(found) // prompts] for i in range(prompts)]
    skipped = [f"{number} skipped: {why}" for why, number in sorted(passed_over.items())]
    return Workload(
        name=name,
        prompts=tuple(found),
        sampling=SamplingParams(temperature=temperature, seed=seed),
        max_tokens=max_tokens,
        source=f"{source} ({'; '.join(skipped)})" if skipped else source,
    )


def _read(text: str, what: str, max_tokens: int) -> tuple[list[tuple[Prompt, str]], Counter[str]]:
    """All prompts with their categories, in the order of the file and each with an id of its own; and what of
    a log was passed over, by reason: requests that cannot be asked again."""
    # Not splitlines: text may hold its line ends, which JSON leaves as they are.
    values = [(number, _json(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    found: dict[str, tuple[Prompt, str]] = {}
    passed_over: Counter[str] = Counter()
    is_log = any(is_event(value) for _, value in values)
    for number, value in values:
        try:
            prompts = prompts_of_event(value, max_tokens) if is_log else [prompt_of(value, str(number))]
        except Unreadable as error:
            if not is_log:
                raise PromptError(f"{what}, line {number}", str(error), _FORMS) from None
            passed_over[str(error)] += 1
            continue
        for prompt in prompts:
            names = chain([prompt.id], (f"{prompt.id}.{i}" for i in count(2)))
            name = next(name for name in names if name not in found)
            found[name] = replace(prompt, id=name), "" if is_log else value.get("category") or ""
    if not found and is_log:
        reasons = [f"; {why} ({number})" for why, number in sorted(passed_over.items())]
        why = "the log holds no request that could be asked again" + "".join(reasons)
        raise PromptError(what, why, "Log the bodies too: outrider serve --log-json --log-prompts.")
    if not found:
        raise PromptError(what, "it holds no prompts", _FORMS)
    return list(found.values()), passed_over


def _json(line: str) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError):
        return line


def _of_categories(found: Sequence[tuple[Prompt, str]], wanted: Sequence[str], what: str) -> list[Prompt]:
    there = dict.fromkeys(category for _, category in found if category)
    if missing := [category for category in wanted if category not in there]:
        known = f"It has: {', '.join(there)}." if there else "Its lines name none; leave the category out."
        raise PromptError(what, f"it has no category {missing[0]!r}", known)
    return [prompt for prompt, category in found if not wanted or category in wanted]


# One line of a file


class Unreadable(Exception):
    """Why a line holds no prompt."""


_Text = Annotated[str, Field(min_length=1)]


class _Function(BaseModel):
    name: _Text
    arguments: str = "{}"


class _Tool(BaseModel):
    """A tool, or a call of one."""

    id: str | None = None
    function: _Function


class _Part(BaseModel):
    text: str


class _Message(BaseModel):
    """OpenAI's, whose content may come in parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Tool] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content in (None, []) and not self.tool_calls:
            raise ValueError("it is empty")
        return self

    def plain(self) -> dict[str, Any]:
        found = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        found["role"] = "system" if self.role == "developer" else self.role
        parts = self.content or ""
        found["content"] = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id or f"call_{i}", "type": "function", "function": call.function.model_dump()}
                for i, call in enumerate(self.tool_calls)
            ]
        return found


_Schema = dict[str, Any] | str


class _PlainFormat(BaseModel):
    type: Literal["text", "json_object"]
    of: _Schema | None = Field(None, alias="schema")


class _Named(BaseModel):
    of: _Schema = Field(alias="schema")
    strict: bool | None = None


class _SchemaFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: _Named


class _Structured(BaseModel):
    of: _Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class _Line(BaseModel):
    """A line of a file, or the request that a log has, with every field by which `outrider serve` limits an
    answer."""

    turns: Annotated[list[_Text], Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt: _Text | None = None
    text: _Text | None = None
    tools: list[_Tool] | None = None
    max_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None
    category: str | None = None
    response_format: Annotated[_PlainFormat | _SchemaFormat, Field(discriminator="type")] | None = None
    json_schema: _Schema | None = None
    grammar: str | None = None
    structured_outputs: _Structured | None = None

    def limit(self) -> Grammar | None:
        asked, nested, lenient = (
            self.response_format,
            self.structured_outputs or _Structured.model_validate({}),
            False,
        )
        schema = self.json_schema or nested.of or (_OBJECT if nested.json_object else None)
        if isinstance(asked, _SchemaFormat):
            schema, lenient = asked.json_schema.of, asked.json_schema.strict is False
        elif asked is not None and asked.type == "json_object":
            schema = asked.of or _OBJECT
        if schema is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return Grammar("json_schema", text, lenient=lenient)
        if text := self.grammar or nested.grammar or "":
            return Grammar(grammar_kind(text), text)
        if nested.choice is not None:
            return Grammar("choice", json.dumps(nested.choice))
        return None if nested.regex is None else Grammar("regex", nested.regex)


def prompt_of(value: Any, name: str) -> Prompt:
    """The prompt in a line's value; `name` is its id where it has none. Raises Unreadable, also for a key
    that all but spells one of ours: it would do nothing."""
    if not isinstance(value, dict):
        raise Unreadable("it is not a JSON object")
    own = [key for key in (value.get("id"), value.get("question_id")) if isinstance(key, str | int)]
    prompt = prompt_of_request(value, next((str(key) for key in own if key != ""), name))
    for key in value if "turns" not in value else ():
        near = get_close_matches(key, _KNOWN, 1, _ALIKE)
        if near and near[0] != key:
            raise Unreadable(f"it has no use for {key!r} (did you mean {near[0]!r}?)")
    return prompt


def prompt_of_request(body: Mapping[str, Any], name: str) -> Prompt:
    """The prompt that a request of a chat or a completion asks. Raises Unreadable."""
    try:
        line = _Line.model_validate(body)
    except ValidationError as error:
        raise Unreadable(str(invalid(error))) from None
    if line.turns:
        first, *others = line.turns
        return Prompt(name, ({"role": "user", "content": first},), follow_ups=tuple(others))
    given: tuple[Mapping[str, Any], ...] | str | None = line.prompt or line.text
    if line.messages:
        given = tuple(message.plain() for message in line.messages)
    if given is None:
        raise Unreadable(f"it holds no prompt but {', '.join(map(repr, list(body)[:6])) or 'nothing'}")
    tools = tuple(body.get("tools") or ()) if line.messages else ()
    return Prompt(name, given, grammar=line.limit(), tools=tools, max_tokens=line.max_tokens)


# Requests that a server logged (`outrider serve --log-json --log-prompts`), to be asked again: messages,
# tools, schemas, and their limit on the answer up to the workload's. How it is sampled is the workload's.


def is_event(value: Any) -> bool:
    """Whether a value is a line of the server's log."""
    return isinstance(value, dict) and isinstance(value.get("event"), str) and "level" in value


def prompts_of_event(value: Any, max_tokens: int) -> list[Prompt]:
    """What a line of the log asked for: nothing unless it is a request that was answered.

    Raises Unreadable where it asked for something that cannot be asked again.
    """
    route = str(value.get("route", "")).removeprefix("/v1") if is_event(value) else ""
    is_answered = (value.get("status"), value.get("method")) == (200, "POST") if route else False
    if not is_answered or value["event"] != "request" or route not in _ROUTES:
        return []
    if not isinstance(value.get("body"), str):
        raise Unreadable("the body was not logged")
    try:
        body = parse_json(value["body"])
    except (ValueError, RecursionError):
        raise Unreadable("the body is longer than what is logged") from None
    if not isinstance(body, dict):
        raise Unreadable("the body is not an object")
    name = str(value.get("id") or "request")
    found = [prompt_of_request(request, name) for request in _requests(route, body)]
    return [replace(p, max_tokens=min(p.max_tokens or max_tokens, max_tokens)) for p in found]


_ROUTES = ("/chat/completions", "/completions", "/responses")


def _requests(route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What an endpoint was asked, as requests that a prompt file could hold."""
    if route == "/responses":
        raise Unreadable("it was asked of /v1/responses")
    if route == "/completions":
        asked = body.get("prompt")
        prompts = asked if isinstance(asked, list) else [asked]
        if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
            raise Unreadable("the prompt is given in tokens")
        body.pop("messages", None)
        return [{**body, "prompt": prompt} for prompt in prompts]
    tools = None if body.get("tool_choice") == "none" else body.get("tools")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return [{**body, "messages": body.get("messages"), "tools": tools, "max_tokens": limit}]
