"""A model's chat format: how it is given tools, how it calls them, and how it reasons."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from outrider.core.contracts import Vocabulary
from outrider.core.data import AnswerReader, Grammar, Thought
from outrider.core.errors import InputError, PromptError
from outrider.core.files import parse_json
from outrider.core.params import FastForward
from outrider.formats.grammar import (
    MAX_CALLS,
    Call,
    Named,
    ReasoningMarkers,
    Rules,
    ToolChoice,
    ToolSpec,
    Written,
    answer_grammar,
)
from outrider.formats.harmony import CONTENT, HARMONY, ChannelReader, Harmony
from outrider.formats.reader import Reader
from outrider.formats.syntaxes import JSON, PROBE, CallSyntax, syntax_of
from outrider.models.chat import ChatTemplate

Message = dict[str, Any]

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""What templates call the reasoning of an earlier turn; the first that one reads is taken."""
_REASONING = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


class ToolSupport(NamedTuple):
    """What a template puts into the prompt: lists of tools, calls of earlier turns, their results; and how it
    takes calls: their arguments as objects (or as JSON text), several in one message (or one). `reasoning` is
    its name of what was thought in an earlier turn."""

    tools: bool = False
    calls: bool = False
    results: bool = False
    objects: bool = True
    several: bool = True
    reasoning: str = "reasoning_content"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What `format_of` found out about a model. The prompt that methods take is the rendered conversation: it
    tells whether the answer begins inside the model's reasoning."""

    _syntax: CallSyntax | Harmony
    _control: Mapping[str, int]
    _markers: ReasoningMarkers
    reasons: bool
    """whether its template knows of reasoning"""
    _support: ToolSupport

    @property
    def name(self) -> str:
        return self._syntax.name

    @property
    def visible(self) -> tuple[int, ...]:
        """The control tokens whose spelling a reader has to see."""
        return tuple(self._control.values())

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec],
        choice: ToolChoice = "auto",
        *,
        parallel: bool = True,
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools for `ChatTemplate.render`. With the choice "none" the model is given no
        tools. Raises PromptError for calls and contents that cannot be put in."""
        plain, can = _plain_messages(messages), self._support
        given = () if choice == "none" else tools
        if not can.calls:
            plain = _calls_as_text(plain, self._syntax.written)
        if not can.results:
            plain = _results_as_text(plain)
        if not can.several:
            plain = _one_call_each(plain)
        _adapt(plain, can, short_ids=self.name == "mistral")
        if not can.tools:
            return _with_guide(plain, given, self._syntax.written, parallel=parallel), None
        return plain, [_tool_entry(tool) for tool in given] or None

    def grammar(
        self,
        tools: Sequence[ToolSpec],
        choice: ToolChoice,
        *,
        parallel: bool,
        fast_forward: FastForward = "exact",
        prompt: str = "",
        content: Grammar | None = None,
    ) -> Grammar | None:
        """What the answer has to be; None: anything. `content` limits an answer that calls no tool, after
        reasoning that the prompt has opened.

        A named tool is called once; otherwise there are up to `MAX_CALLS` calls, or one unless
        `parallel`. With "auto" text is free until a call begins, and over with the calls. The model may
        reason first, where its template does. Notices say what of schemas is not enforced; GrammarError is
        raised for a strict tool.
        """
        allowed = [] if choice == "none" else list(tools)
        if isinstance(choice, Named):
            allowed = [tool for tool in tools if tool.name == choice.name]
        if not allowed:
            after = self._markers.closer if self._state(prompt) == "opened" else None
            after = CONTENT if isinstance(self._syntax, Harmony) else after
            return content and replace(content, after=after)
        required, state, rules = choice != "auto", self._state(prompt), Rules(self._control)
        text = None if required else "free" if content is None else "@content"
        if isinstance(self._syntax, Harmony):
            source = self._syntax.grammar(rules, allowed, text)
        else:
            max_calls = MAX_CALLS if parallel and not isinstance(choice, Named) else 1
            calls = self._syntax.calls(rules, allowed, max_calls, free=text == "free")
            reasoning = None if state == "over" else self._markers
            source = answer_grammar(rules, calls, text, reasoning=reasoning, opened=state == "opened")
        return Grammar(
            "lark", source, fast_forward=fast_forward, content=content if text == "@content" else None
        )

    def begun(self, prompt: str, content: str, reasoning: str = "") -> str | None:
        """What an answer begins with whose content is to go on; `reasoning` comes before it where the prompt
        opens some. None where the format has no such beginning."""
        if isinstance(self._syntax, Harmony):
            return None
        is_opened = self._state(prompt) == "opened"
        return f"{reasoning}{self._markers.closer}\n\n{content}" if is_opened else content

    def thought(self, prompt: str, message: str = "") -> Thought | None:
        """How an answer to the prompt reasons, without a budget; None where it does not. `message` comes
        before a closing that is forced."""
        state = self._state(prompt)
        if isinstance(self._syntax, Harmony):
            return self._syntax.thought(message)
        if state == "over":
            return None
        opener, closer = self._markers
        return Thought(opener, closer, message + closer, state == "opened")

    def reader(self, tools: Sequence[ToolSpec], *, prompt: str = "", must_call: bool = False) -> AnswerReader:
        """Reads one answer; without tools no calls are looked for."""
        if isinstance(self._syntax, Harmony):
            return ChannelReader([tool.name for tool in tools])
        types = {tool.name: self._syntax.types(tool) for tool in tools}
        return Reader(self._syntax, types, self._markers, self._state(prompt) == "opened", must_call)

    def _state(self, prompt: str) -> Literal["opened", "over", "possible"]:
        """Whether an answer to the prompt begins inside reasoning, after it, or may begin with it."""
        end = prompt.rstrip()
        if end.endswith(self._markers.opener):
            return "opened"
        return "possible" if self.reasons and not end.endswith(self._markers.closer) else "over"


def format_of(template: ChatTemplate | None, vocabulary: Vocabulary) -> ChatFormat:
    """The chat format of a template. A model whose template says nothing of calls, or in a way that is not
    known here, is given tools in a system message and answers in plain JSON."""
    source = "" if template is None else template.source
    syntax, support = (JSON, ToolSupport()) if template is None else _tried(template)
    read = [key for key in _REASONING_KEYS if re.search(rf"\.{key}\b|\[.{key}.\]", source)]
    support = support._replace(reasoning=read[0] if read else _REASONING_KEYS[0])
    mentioned = [m for m in _REASONING if m.opener in source or m.closer in source]
    reasoning = mentioned[-1] if mentioned else _REASONING[0]
    markers = (*syntax.markers, *reasoning)
    control = {marker: token for marker in markers if (token := _control(marker, vocabulary)) is not None}
    reasons = bool(mentioned) or isinstance(syntax, Harmony)
    return ChatFormat(syntax, control, reasoning, reasons, support)


def _control(marker: str, vocabulary: Vocabulary) -> int | None:
    for token in vocabulary.tokenize(marker, add_special=False, parse_special=True):
        is_control = vocabulary.is_control(token) and not vocabulary.ends_generation(token)
        if is_control and vocabulary.spelling(token) == marker.encode():
            return token
    return None


# What a template does with tools is found out by rendering small conversations.

_USER = {"role": "user", "content": "user probe"}
_RESULT = {"role": "tool", "tool_call_id": "probe1234", "name": PROBE.name, "content": "probe result"}


def _tried(template: ChatTemplate) -> tuple[CallSyntax | Harmony, ToolSupport]:
    """How the model calls tools, and what its template does of that."""
    tool = ToolSpec(
        PROBE.name, "A probe.", {"properties": {key: {"type": "string"} for key in PROBE.arguments}}
    )
    lists = tool.name in _render(template, [_USER], tools=[_tool_entry(tool)])
    for objects in (True, False):
        text = _render(template, _turns(1, objects))
        is_quoted = '\\"probe_key' in text
        if PROBE.name in text and not is_quoted and (syntax := _syntax_of(template, text)):
            several = _render(template, _turns(2, objects)).count("probe_key") == 2 * text.count("probe_key")
            return syntax, ToolSupport(lists, True, "probe result" in text, objects, several)
    if syntax := _syntax_of(template, "") if lists else None:
        said = {"role": "assistant", "content": "probe call"}
        results = "probe result" in _render(template, [_USER, said, _RESULT])
        return syntax, ToolSupport(lists, results=results)
    return _syntax_of(template, None) or JSON, ToolSupport()


def _syntax_of(template: ChatTemplate, rendered: str | None) -> CallSyntax | Harmony | None:
    if HARMONY.is_of(template.source):
        return HARMONY
    return None if rendered is None else syntax_of(template.source, rendered)


def _turns(num_calls: int, objects: bool) -> list[dict[str, Any]]:
    function = {"name": PROBE.name, "arguments": PROBE.arguments if objects else json.dumps(PROBE.arguments)}
    calls = [{"id": "probe1234", "type": "function", "function": function}] * num_calls
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *[_RESULT] * num_calls]


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
) -> str:
    try:
        return template.render(messages, tools=tools)
    except InputError:
        return ""


# Conversations with tools, in the form that a template expects


def _tool_entry(tool: ToolSpec) -> dict[str, Any]:
    """A tool as templates list it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with text as content, developers as the system, the arguments of calls as objects, and
    with the name of the tool in its results. Raises PromptError for what is none of that."""
    names: dict[str, str] = {}
    plain = []
    for i, given in enumerate(messages):
        message = {**given, "content": _text(f"messages[{i}].content", given.get("content"))}
        if message.get("role") == "developer":
            message["role"] = "system"
        if message.get("tool_calls"):
            place = f"messages[{i}].tool_calls"
            calls = [_call(f"{place}[{j}]", call) for j, call in enumerate(message["tool_calls"])]
            message["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        else:
            message.pop("tool_calls", None)
        if message.get("role") == "tool" and (name := names.get(message.get("tool_call_id", ""))):
            message.setdefault("name", name)
        plain.append(message)
    return plain


def _text(place: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise PromptError(place, "it holds something that is not text", "Send text alone.")
    return "\n".join(str(text) for text in texts)


def _call(place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(place, "it names no function", 'Give {"function": {"name": …, "arguments": …}}.')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise PromptError(f"{place}.function.arguments", "it is not a JSON object", "Send it as it came.")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _adapt(messages: Sequence[Message], can: ToolSupport, *, short_ids: bool) -> None:
    """Change plain messages in place to what a template expects. `short_ids`: ids of calls and results are
    nine letters and digits, as Mistral demands."""
    for message in messages:
        if "reasoning_content" in message:
            message[can.reasoning] = message.pop("reasoning_content")
        for call in message.get("tool_calls", ()):
            if not can.objects:
                text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                call["function"]["arguments"] = text
            if short_ids:
                call["id"] = _short(call["id"])
        if short_ids and message.get("role") == "tool":
            message["tool_call_id"] = _short(str(message.get("tool_call_id", "")))


def _short(given: str) -> str:
    if len(given) == 9 and given.isascii() and given.isalnum():
        return given
    return base64.b32encode(hashlib.sha256(given.encode()).digest())[:9].decode()


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message for each call, followed by its result, for templates that take no more."""
    split: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            asked = message.get("tool_call_id")
            if call := next((one for one in waiting if one["tool_calls"][0]["id"] == asked), None):
                waiting.remove(call)
                split.append(call)
            split.append(message)
            continue
        split += waiting
        waiting = [
            {**message, "content": "" if i else message["content"], "tool_calls": [call]}
            for i, call in enumerate(message.get("tool_calls") or ())
        ]
        split += () if waiting else (message,)
    return split + waiting


def _calls_as_text(messages: Sequence[Message], written: Written) -> list[Message]:
    """Calls of earlier turns as text of the assistant."""
    turns = []
    for message in messages:
        calls = [Call(**call["function"]) for call in message.get("tool_calls", ())]
        texts = [message["content"], written(calls) if calls else ""]
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        turns.append({**others, "content": "\n".join(filter(None, texts))})
    return turns


def _results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Results of calls as text of the user."""
    turns: list[Message] = []
    was_result = False
    for given in messages:
        is_result = given.get("role") == "tool"
        result = f"Result of {given.get('name', 'the function')}: {given['content']}"
        message = {"role": "user", "content": result} if is_result else dict(given)
        # Templates want users and assistants to take turns.
        if (is_result or was_result) and turns and turns[-1]["role"] == message["role"] == "user":
            message["content"] = f"{turns.pop()['content']}\n\n{message['content']}"
        turns.append(message)
        was_result = is_result
    return turns


def _with_guide(
    messages: Sequence[Message], tools: Sequence[ToolSpec], written: Written, *, parallel: bool
) -> list[Message]:
    """The messages with the tools, and how to call them, in the system message."""
    if not tools:
        return list(messages)
    listed = (json.dumps(_tool_entry(tool)["function"], ensure_ascii=False) for tool in tools)
    sample = written([Call("<function>", {"<argument>": "<value>"})])
    is_json = sample.startswith("{")
    if is_json:
        sample = sample.replace('{"<argument>": "<value>"}', "{<its arguments>}")
    several = " For several calls, write one such line each." if parallel and is_json else ""
    guide = "\n".join(
        [
            "You can call these functions:",
            *listed,
            "",
            f"To call one, answer with {'a line that is nothing but a JSON object' if is_json else 'this'}:",
            sample,
            f"Its result is then told to you.{several} If no function is of use, answer in plain text.",
        ]
    )
    if messages and messages[0]["role"] == "system":
        first, *others = messages
        return [{**first, "content": f"{first['content']}\n\n{guide}"}, *others]
    return [{"role": "system", "content": guide}, *messages]
