"""A conversation to the text that the model was trained on, by the model's own template.

Templates come with the model file, so they run in jinja2's sandbox with a cap on loop rounds and on the
length of the text: against broken templates, not against hostile ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from threading import Lock
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outrider.core.contracts import Vocabulary
from outrider.core.errors import InputError, PromptError

Messages = Sequence[Mapping[str, Any]]

_MAX_ROUNDS = 200_000
"""loop rounds and macro calls of one rendering: a second or two"""
_MAX_LENGTH = 16 * 2**20
"""characters of the rendered text: several times what the longest context holds"""


class ChatTemplate:
    """A chat template (jinja2, as in the GGUF key `tokenizer.chat_template`). `bos` and `eos` are the texts
    of the model's start and end tokens. Rendering is safe to call from several threads. Raises InputError for
    a template that does not compile."""

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        self.source = source
        self.bos = bos
        self.eos = eos
        self._lock = Lock()
        self._environment = _Environment()
        try:
            tree = _Meter().visit(self._environment.parse(source))
            tree.set_environment(self._environment)
            self._template = self._environment.from_string(tree)
        except Exception as error:
            why = f"it does not compile: {_sentence(error)}"
            raise InputError("chat template", why, "Use another template, or none.") from error

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The text of a conversation, ready for the model's answer. `extra` are variables that some templates
        read (`enable_thinking`). Where the template refuses or leaves out a leading system message, that goes
        before the text of the first user message.

        Raises PromptError for no messages or one without a role, and InputError with the template's own
        complaint."""
        if not messages:
            raise PromptError("conversation", "it has no messages", "Give at least one.")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                what, way_out = f"message {i} of the conversation", 'Give it a "role": user, assistant, …'
                raise PromptError(what, "it has no role", way_out)
        if messages[0]["role"] == "system" and not self._takes_system:
            messages = _fold_system(messages)
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._render({**extra, **given})

    def tokenize(self, rendered: str, vocabulary: Vocabulary) -> list[int]:
        """Tokens of a rendered conversation, with one start token where the template writes
        one or the tokenizer adds one, and no end token after the text."""
        own = vocabulary.tokenize("", add_special=True)
        adds_bos = bool(own) and vocabulary.spelling(own[0]) == self.bos.encode()
        text = rendered.removeprefix(self.bos) if adds_bos else rendered
        return own[:adds_bos] + vocabulary.tokenize(text, add_special=False, parse_special=True)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether a system message reaches the text. A template that fails without one, too,
        is given the benefit of the doubt: its own complaint is then what the user should see."""
        system = {"role": "system", "content": "system probe"}
        user = {"role": "user", "content": "user probe"}
        try:
            return "system probe" in self._render({"messages": [system, user], "add_generation_prompt": True})
        except InputError:
            try:
                self._render({"messages": [user], "add_generation_prompt": True})
            except InputError:
                return True
            return False

    def _render(self, variables: Mapping[str, Any]) -> str:
        # A list that is empty is not "no tools" to templates that test `tools is not none`.
        tools = variables.get("tools") or None
        names = {**variables, "tools": tools, "bos_token": self.bos, "eos_token": self.eos}
        parts: list[str] = []
        length = 0
        with self._lock:
            self._environment.rounds_left = _MAX_ROUNDS
            try:
                for part in self._template.generate(names):
                    length += len(part)
                    if length > _MAX_LENGTH:
                        raise SecurityError(f"it writes more than {_MAX_LENGTH:,} characters")
                    parts.append(part)
            except Exception as error:  # a template can raise whatever its expressions raise
                why = f"it refuses the conversation: {_sentence(error)}"
                way_out = (
                    "Change the messages, use another template, or give the prompt as it is, without one."
                )
                raise InputError("chat template", why, way_out) from error
        return "".join(parts)


def _fold_system(messages: Messages) -> Messages:
    system, *others = messages
    for i, message in enumerate(others):
        if message["role"] == "user":
            content = f"{_text(system)}\n\n{_text(message)}"
            return [*others[:i], {**message, "content": content}, *others[i + 1 :]]
    return [{**system, "role": "user"}, *others]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _sentence(error: Exception) -> str:
    """An error's message as the middle of a sentence; its type where it says nothing itself."""
    message, kind = str(error).strip().rstrip("."), type(error).__name__
    if isinstance(error, TemplateError):
        return message or "no reason given"
    return f"{kind}: {message}" if message else kind


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with what chat templates expect to find, and a limit of rounds."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.rounds_left = 0

    def count_round(self) -> None:
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise SecurityError(f"it takes more than {_MAX_ROUNDS:,} loop rounds")


class _Meter(NodeTransformer):
    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("count_round"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _count


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
