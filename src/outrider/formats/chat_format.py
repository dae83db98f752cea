"""A model's chat format: how it is given tools, how it calls them, and how it reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from outrider.core.contracts import Vocabulary
from outrider.core.data import AnswerReader, Grammar, Thought
from outrider.core.errors import InputError
from outrider.core.params import FastForward
from outrider.formats.conversation import (
    Message,
    Named,
    ReasoningMarkers,
    ToolChoice,
    ToolSpec,
    adapt,
    calls_as_text,
    one_call_each,
    plain_messages,
    results_as_text,
    tool_entry,
    with_guide,
)
from outrider.formats.grammar import MAX_CALLS, Rules, answer_grammar
from outrider.formats.harmony import (
    CONTENT,
    HARMONY,
    ChannelReader,
    Harmony,
    harmony_grammar,
    harmony_thought,
)
from outrider.formats.reader import Reader
from outrider.formats.syntaxes import JSON, PROBE, CallSyntax, syntax_of
from outrider.models.chat import ChatTemplate

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
        plain, can = plain_messages(messages), self._support
        given = () if choice == "none" else tools
        if not can.calls:
            plain = calls_as_text(plain, self._syntax.written)
        if not can.results:
            plain = results_as_text(plain)
        if not can.several:
            plain = one_call_each(plain)
        short_ids = self.name == "mistral"
        adapt(plain, reasoning=can.reasoning, argument_texts=not can.objects, short_ids=short_ids)
        if not can.tools:
            return with_guide(plain, given, self._syntax.written, parallel=parallel), None
        return plain, [tool_entry(tool) for tool in given] or None

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
        reason first, where its template does. Raises GrammarError for a strict tool whose schema cannot be
        enforced.
        """
        allowed = [] if choice == "none" else list(tools)
        if isinstance(choice, Named):
            allowed = [tool for tool in tools if tool.name == choice.name]
        if not allowed:
            return content and replace(content, after=self.content_follows(prompt))
        required, state, rules = choice != "auto", self._state(prompt), Rules(self._control)
        text = None if required else "free" if content is None else "@content"
        if isinstance(self._syntax, Harmony):
            source = harmony_grammar(rules, allowed, text)
        else:
            max_calls = MAX_CALLS if parallel and not isinstance(choice, Named) else 1
            calls = self._syntax.calls(rules, allowed, max_calls, free=text == "free")
            reasoning = None if state == "over" else self._markers
            source = answer_grammar(rules, calls, text, reasoning=reasoning, opened=state == "opened")
        return Grammar(
            "lark", source, fast_forward=fast_forward, content=content if text == "@content" else None
        )

    def content_follows(self, prompt: str) -> str | None:
        """The text that has to come before the content of an answer; None: it may come at once."""
        if isinstance(self._syntax, Harmony):
            return CONTENT
        return self._markers.closer if self._state(prompt) == "opened" else None

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
            return harmony_thought(message)
        if state == "over":
            return None
        opener, closer = self._markers
        return Thought(opener, closer, message + closer, state == "opened")

    def notices(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """What of the tools' schemas is not enforced."""
        rules = Rules(self._control)
        if tools:
            self._syntax.calls(rules, tools, 1, free=False)
        return tuple(rules.notices)

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
    lists = tool.name in _render(template, [_USER], tools=[tool_entry(tool)])
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
