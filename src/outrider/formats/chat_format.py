"""A model's chat format: how it is told of tools, how it calls them, and how it reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from outrider.chat import ChatTemplate
from outrider.core.contracts import Vocabulary
from outrider.core.data import Grammar
from outrider.core.errors import SettingError
from outrider.core.params import FastForward
from outrider.formats.arguments import arguments_schema
from outrider.formats.calls import CallSyntax
from outrider.formats.conversation import (
    Message,
    described,
    one_call_each,
    plain_messages,
    tool_entry,
    with_argument_texts,
    with_short_ids,
)
from outrider.formats.data import Named, ToolChoice, ToolSpec
from outrider.formats.hermes import Hermes
from outrider.formats.lark import MAX_CALLS, CallGrammar, Rules, answer_grammar
from outrider.formats.mistral import Mistral
from outrider.formats.objects import Objects
from outrider.formats.reader import Reader
from outrider.formats.templates import ToolSupport, tool_support
from outrider.formats.thought import ThoughtMarkers

_THOUGHTS = (ThoughtMarkers("<think>", "</think>"), ThoughtMarkers("[THINK]", "[/THINK]"))
_OTHER_CALLS = ("<function=", "<arg_key>")
"""Signs of templates whose <tool_call> holds no JSON."""


class Syntax(CallSyntax, CallGrammar, Protocol):
    """How a chat format writes calls."""

    name: str
    markers: tuple[str, ...]


class ChatFormat:
    """What `format_of` found out about a model.

    `visible` are the control tokens whose spelling a reader has to see. The prompt that methods take is
    the rendered conversation: it tells whether the answer begins inside the model's reasoning.
    """

    def __init__(
        self,
        syntax: Syntax,
        control: Mapping[str, int],
        thought: ThoughtMarkers,
        *,
        thinks: bool,
        support: ToolSupport | None,
    ) -> None:
        self.name = syntax.name
        self.visible = tuple(control.values())
        self._syntax = syntax
        self._control = control
        self._thought = thought
        self._thinks = thinks
        self._support = support

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec],
        choice: ToolChoice = "auto",
        *,
        parallel: bool = True,
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools for `ChatTemplate.render`. With the choice "none" the model is told of no
        tools. Raises PromptError for calls and contents that cannot be put in."""
        plain = plain_messages(messages)
        told = () if choice == "none" else tools
        if self._support is None:
            return described(plain, told, _PLAIN.spelled, parallel=parallel), None
        if not self._support.several:
            plain = one_call_each(plain)
        if not self._support.objects:
            plain = with_argument_texts(plain)
        if isinstance(self._syntax, Mistral):
            plain = with_short_ids(plain)
        return plain, [tool_entry(tool) for tool in told] or None

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
        chosen = _chosen(tools, choice)
        if not chosen:
            return None
        state = self._state(prompt)
        text = answer_grammar(
            self._syntax,
            Rules(self._control),
            chosen,
            required=choice != "auto",
            most=MAX_CALLS if parallel and not isinstance(choice, Named) else 1,
            thought=None if state == "over" else self._thought,
            opened=state == "opened",
        )
        return Grammar("lark", text, fast_forward=fast_forward)

    def notices(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """What of the tools' schemas is not enforced."""
        return tuple(notice for tool in tools for notice in arguments_schema(tool)[1])

    def reader(self, tools: Sequence[ToolSpec], *, reasoning: bool, prompt: str = "") -> Reader:
        """Reads one answer; without tools no calls are looked for. `reasoning` False leaves it in the
        content."""
        return Reader(
            self._syntax,
            [tool.name for tool in tools],
            self._thought,
            separates=reasoning,
            opened=self._state(prompt) == "opened",
        )

    def _state(self, prompt: str) -> Literal["opened", "over", "possible"]:
        """Whether an answer to the prompt begins inside reasoning, behind it, or may begin with it."""
        end = prompt.rstrip()
        if end.endswith(self._thought.opener):
            return "opened"
        return "possible" if self._thinks and not end.endswith(self._thought.closer) else "over"


_PLAIN = Objects("json", "arguments", "\n", has_tag=False)


def format_of(template: ChatTemplate | None, vocabulary: Vocabulary) -> ChatFormat:
    """The chat format that a template speaks. One that knows no tools, or writes calls in a way that is not
    known here, is told of tools in a system message and answers in plain JSON."""
    source = "" if template is None else template.source
    support = None if template is None else tool_support(template)
    syntax = _syntax_of(source) if support else None
    mentioned = [t for t in _THOUGHTS if t.opener in source or t.closer in source]
    thought = mentioned[-1] if mentioned else _THOUGHTS[0]
    found: Syntax = syntax or _PLAIN
    markers = (*found.markers, thought.opener, thought.closer)
    control = {marker: token for marker in markers if (token := _control(marker, vocabulary)) is not None}
    return ChatFormat(found, control, thought, thinks=bool(mentioned), support=support if syntax else None)


def _syntax_of(source: str) -> Syntax | None:
    if "[TOOL_CALLS]" in source:
        return Mistral(source)
    if "<tool_call>" in source and not any(sign in source for sign in _OTHER_CALLS):
        return Hermes()
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return Objects("llama3", "parameters", "; ", has_tag=True)
    return None


def _control(marker: str, vocabulary: Vocabulary) -> int | None:
    """The control token that is spelled so."""
    for token in vocabulary.tokenize(marker, add_special=False, parse_special=True):
        is_control = vocabulary.is_control(token) and not vocabulary.ends_generation(token)
        if is_control and vocabulary.spelling(token) == marker.encode():
            return token
    return None


def _chosen(tools: Sequence[ToolSpec], choice: ToolChoice) -> list[ToolSpec]:
    """The tools that may be called."""
    if isinstance(choice, Named):
        chosen = [tool for tool in tools if tool.name == choice.name]
        if not chosen:
            raise SettingError("tool_choice", f"no tool is called {choice.name}", "Name one of the tools.")
        return chosen
    if choice == "required" and not tools:
        raise SettingError("tool_choice", "there is no tool that could be called", "Give tools.")
    return [] if choice == "none" else list(tools)
