"""A workload from its file: the lines that hold prompts, those of the categories asked for, evenly spread.

A line has Spec-Bench's shape, a chat request's or a text's, or is an event of a server's log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Any

from outrider.core.data import Grammar
from outrider.core.errors import PromptError
from outrider.core.files import parse_json, read_text
from outrider.core.params import SamplingParams, grammar_kind
from outrider.lab.prompts import Prompt, Workload

_FORMS = 'Each line is {"turns": […]}, {"messages": […]}, {"prompt": "…"} or an event of a server\'s log.'

_ROLES = ("system", "developer", "user", "assistant", "tool")
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
                raise PromptError(f"{what}, line {number}", str(error), error.way_out or _FORMS) from None
            passed_over[str(error)] += 1
            continue
        category = "" if is_log else value.get("category")
        for prompt in prompts:
            names = chain([prompt.id], (f"{prompt.id}.{i}" for i in count(2)))
            name = next(name for name in names if name not in found)
            found[name] = replace(prompt, id=name), category if isinstance(category, str) else ""
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
    """Why a line holds no prompt; `way_out` where there is a better one than to show the forms."""

    def __init__(self, why: str, way_out: str = "") -> None:
        super().__init__(why)
        self.way_out = way_out


def prompt_of(value: Any, name: str) -> Prompt:
    """The prompt in a line's value; `name` is its id where it has none. Raises Unreadable."""
    if isinstance(value, str):
        raise Unreadable("it is not a JSON object")
    if not isinstance(value, dict):
        kinds = {list: "array", bool: "true or false", int: "number", float: "number"}
        raise Unreadable(f"it is a JSON {kinds.get(type(value), 'null')}, not an object")
    for key in ("question_id", "id"):
        own = value.get(key)
        if isinstance(own, str | int) and not isinstance(own, bool) and own != "":
            name = str(own)
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise Unreadable("its turns are not a list of texts")
        return Prompt(name, ({"role": "user", "content": turns[0]},), follow_ups=tuple(turns[1:]))
    _refuse_slips(value)
    return prompt_of_request(value, name)


def prompt_of_request(body: Mapping[str, Any], name: str) -> Prompt:
    """The prompt that a request of a chat or a completion asks. Raises Unreadable."""
    given: tuple[Mapping[str, Any], ...] | str
    if "messages" in body:
        given, tools = messages_of(body["messages"]), tools_of(body.get("tools"))
    else:
        given, tools = body.get("prompt", body.get("text")), ()
        if not isinstance(given, str) or not given:
            found = ", ".join(map(repr, list(body)[:6])) or "nothing"
            raise Unreadable(f"it holds no prompt but {found}" if given is None else "its prompt is not text")
    limit = max_tokens_of(body.get("max_tokens"))
    return Prompt(name, given, grammar=grammar_of_fields(body), tools=tools, max_tokens=limit)


def _refuse_slips(value: Mapping[str, Any]) -> None:
    """Raise Unreadable for a key that all but spells one of ours: it would do nothing."""
    for key in value:
        near = get_close_matches(key, _KNOWN, 1, _ALIKE)
        if near and near[0] != key:
            raise Unreadable(f"it has no use for {key!r}", f"Did you mean {near[0]!r}?")


def max_tokens_of(value: Any) -> int | None:
    """A limit on the answer. Raises Unreadable for what is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unreadable(f"its max_tokens is {value!r}, not a number of tokens")
    return value


def messages_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's messages with each content as one text. Raises Unreadable."""
    if not isinstance(value, list) or not value:
        raise Unreadable("its messages are not a list")
    return tuple(_message(message, i) for i, message in enumerate(value, 1))


def _message(message: Any, number: int) -> Mapping[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise Unreadable(f"message {number} has no role of {', '.join(_ROLES)}")
    calls, content = message.get("tool_calls"), text_of(message.get("content"))
    if content is None and not calls:
        raise Unreadable(f"message {number} is empty: its content is not text")
    plain = {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key)}
    if calls:
        plain["tool_calls"] = _calls(calls, number)
    return {"role": "system" if role == "developer" else role, "content": content or "", **plain}


def text_of(content: Any) -> str | None:
    """A content, which may come in parts, as one text; None for what is no text."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if texts and len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def _calls(calls: Any, number: int) -> list[dict[str, Any]]:
    found = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(f"message {number} has tool calls without a function's name")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            why = f"message {number} has arguments of a tool that are not text"
            raise Unreadable(why, 'OpenAI\'s are JSON in a string: "{\\"path\\": \\"a.txt\\"}".')
        plain = {"name": function["name"], "arguments": arguments}
        found.append({"id": call.get("id") or f"call_{i}", "type": "function", "function": plain})
    return found


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's tools. Raises Unreadable."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise Unreadable("its tools are not a list")
    for number, tool in enumerate(value, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unreadable(f"tool {number} is not a function with a name")
    return tuple(value)


def grammar_of_fields(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a body asks for, in any server's field, as `outrider serve` reads it; None where it
    asks for none. Raises Unreadable."""
    nested = body.get("structured_outputs") or {}
    if not isinstance(nested, dict):
        raise Unreadable("its structured_outputs is not an object")
    fields = {name: value for name, value in body.items() if name != "structured_outputs"}
    fields |= {f"guided_{name}": value for name, value in nested.items() if value is not None}
    for name, read in _READ.items():
        if fields.get(name) is not None:
            try:
                return read(fields[name])
            except (AttributeError, KeyError, TypeError, ValueError):
                raise Unreadable(f"its {name} asks for nothing that is known") from None
    return None


def _format(value: Any) -> Grammar | None:
    match value["type"]:
        case "text":
            return None
        case "json_object":
            return _schema(value.get("schema") or _OBJECT)
        case "json_schema":
            named = value["json_schema"]
            return _schema(named["schema"], lenient=named.get("strict") is False)
    raise ValueError


def _schema(value: Any, *, lenient: bool = False) -> Grammar:
    if not isinstance(value, str | dict):
        raise TypeError
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value), lenient=lenient)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _grammar(value: Any) -> Grammar:
    return Grammar(grammar_kind(_string(value)), value)


_READ: dict[str, Callable[[Any], Grammar | None]] = {
    "response_format": _format,
    "json_schema": _schema,
    "grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": lambda value: Grammar("regex", _string(value)),
    "guided_choice": lambda value: Grammar("choice", json.dumps([_string(part) for part in value])),
    "guided_grammar": _grammar,
    "guided_json_object": lambda _: _schema(_OBJECT),
}


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
