"""A model's chat format: how it is given tools, how it calls them, and how it reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import InputError, SettingError
from outrider.core.params import FastForward
from outrider.formats.conversation import (
    Message,
    Named,
    ReasoningMarkers,
    ToolChoice,
    ToolSpec,
    described,
    one_call_each,
    plain_messages,
    tool_entry,
    with_argument_texts,
    with_short_ids,
)
from outrider.formats.grammar import MAX_CALLS, Rules, answer_grammar, arguments_schema
from outrider.formats.reader import Reader
from outrider.formats.syntaxes import SYNTAXES, CallSyntax, Mistral, Objects
from outrider.models.chat import ChatTemplate

_REASONING = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))
_PLAIN = Objects("json", "arguments", "\n")


class ToolSupport(NamedTuple):
    """How a template takes calls of earlier turns: their arguments as objects (or as JSON text), several
    in one message (or one)."""

    objects: bool
    several: bool


class ChatFormat:
    """What `format_of` found out about a model.

    `visible` are the control tokens whose spelling a reader has to see. The prompt that methods take is
    the rendered conversation: it tells whether the answer begins inside the model's reasoning.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        control: Mapping[str, int],
        markers: ReasoningMarkers,
        *,
        reasons: bool,
        support: ToolSupport | None,
    ) -> None:
        self.name = syntax.name
        self.visible = tuple(control.values())
        self._syntax = syntax
        self._control = control
        self._markers = markers
        self._reasons = reasons
        self._support = support

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
        plain = plain_messages(messages)
        given = () if choice == "none" else tools
        if self._support is None:
            return described(plain, given, _PLAIN.as_text, parallel=parallel), None
        if not self._support.several:
            plain = one_call_each(plain)
        if not self._support.objects:
            plain = with_argument_texts(plain)
        if isinstance(self._syntax, Mistral):
            plain = with_short_ids(plain)
        return plain, [tool_entry(tool) for tool in given] or None

    def grammar(
        self,
        tools: Sequence[ToolSpec],
        choice: ToolChoice,
        *,
        parallel: bool,
        fast_forward: FastForward = "exact",
        prompt: str = "",
    ) -> Grammar | None:
        """What the answer has to be; None: anything.

        A named tool is called once; otherwise there are up to `MAX_CALLS` calls, or one unless
        `parallel`. With "auto" text is free until a call begins, and over with the calls. The model may
        reason first, where its template does. Raises SettingError where the choice fits no tool,
        GrammarError for a strict tool whose schema cannot be enforced.
        """
        allowed = _allowed(tools, choice)
        if not allowed:
            return None
        required, state, rules = choice != "auto", self._state(prompt), Rules(self._control)
        max_calls = MAX_CALLS if parallel and not isinstance(choice, Named) else 1
        calls = self._syntax.calls(rules, allowed, max_calls, free=not required)
        answer = rules.choice(calls if required else [*calls, "free"])
        reasoning = None if state == "over" else self._markers
        text = answer_grammar(rules, answer, required=required, reasoning=reasoning, opened=state == "opened")
        return Grammar("lark", text, fast_forward=fast_forward)

    def notices(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """What of the tools' schemas is not enforced."""
        return tuple(notice for tool in tools for notice in arguments_schema(tool)[1])

    def reader(self, tools: Sequence[ToolSpec], *, reasoning: bool, prompt: str = "") -> Reader:
        """Reads one answer; without tools no calls are looked for. `reasoning` False leaves it in the
        content."""
        names = [tool.name for tool in tools]
        opened = self._state(prompt) == "opened"
        return Reader(self._syntax, names, self._markers, separates=reasoning, opened=opened)

    def _state(self, prompt: str) -> Literal["opened", "over", "possible"]:
        """Whether an answer to the prompt begins inside reasoning, after it, or may begin with it."""
        end = prompt.rstrip()
        if end.endswith(self._markers.opener):
            return "opened"
        return "possible" if self._reasons and not end.endswith(self._markers.closer) else "over"


def format_of(template: ChatTemplate | None, vocabulary: Vocabulary) -> ChatFormat:
    """The chat format of a template. One without tools, or that writes calls in a way that is not known
    here, is given tools in a system message and answers in plain JSON."""
    source = "" if template is None else template.source
    support = None if template is None else _tool_support(template)
    known = next(filter(None, (syntax.of(source) for syntax in SYNTAXES)), None) if support else None
    syntax = known or _PLAIN
    mentioned = [m for m in _REASONING if m.opener in source or m.closer in source]
    reasoning = mentioned[-1] if mentioned else _REASONING[0]
    markers = (*syntax.markers, *reasoning)
    control = {marker: token for marker in markers if (token := _control(marker, vocabulary)) is not None}
    return ChatFormat(syntax, control, reasoning, reasons=bool(mentioned), support=support if known else None)


def _control(marker: str, vocabulary: Vocabulary) -> int | None:
    """The control token that is spelled so."""
    for token in vocabulary.tokenize(marker, add_special=False, parse_special=True):
        is_control = vocabulary.is_control(token) and not vocabulary.ends_generation(token)
        if is_control and vocabulary.spelling(token) == marker.encode():
            return token
    return None


def _allowed(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[ToolSpec]:
    """The tools that may be called."""
    if isinstance(choice, Named):
        named = [tool for tool in tools if tool.name == choice.name]
        if not named:
            raise SettingError("tool_choice", f"no tool is called {choice.name}", "Name one of the tools.")
        return named
    if choice == "required" and not tools:
        raise SettingError("tool_choice", "there is no tool that could be called", "Give tools.")
    return [] if choice == "none" else list(tools)


# What a template does with tools is found out by rendering small conversations.

_TOOL = ToolSpec(
    "probe_tool", "A probe.", {"type": "object", "properties": {"probe_key": {"type": "string"}}}
)
_ARGUMENTS = {"probe_key": "probe value"}
_USER = {"role": "user", "content": "user probe"}


def _tool_support(template: ChatTemplate) -> ToolSupport | None:
    """None where tools, their calls or their results do not get into the text: then they have to be
    described in other words."""
    if _TOOL.name not in _render(template, [_USER], tools=[tool_entry(_TOOL)]):
        return None
    for objects in (True, False):
        text = _render(template, _turns(1, objects))
        if '"probe_key"' in text and _TOOL.name in text and "probe result" in text:
            several = _render(template, _turns(2, objects)).count('"probe_key"') == 2
            return ToolSupport(objects, several)
    return None


def _turns(num_calls: int, objects: bool) -> list[dict[str, Any]]:
    function = {"name": _TOOL.name, "arguments": _ARGUMENTS if objects else json.dumps(_ARGUMENTS)}
    calls = [{"id": "probe1234", "type": "function", "function": function}] * num_calls
    result = {"role": "tool", "tool_call_id": "probe1234", "name": _TOOL.name, "content": "probe result"}
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *[result] * num_calls]


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
) -> str:
    try:
        return template.render(messages, tools=tools)
    except InputError:
        return ""
