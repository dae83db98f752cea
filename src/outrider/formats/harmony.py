"""The channels of gpt-oss: reasoning, text and calls are messages of their own, each with a header.

Source: OpenAI's description of the harmony response format, and gpt-oss' chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Literal

from outrider.core.data import Character, Kind, Part, Thought
from outrider.formats.grammar import Call, Rules, ToolSpec
from outrider.formats.reader import hidden, shown

_START, _CHANNEL, _MESSAGE, _END = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>"
_CONSTRAIN = "<|constrain|>"
_TO = " to=functions."
CONTENT = f"{_CHANNEL}final{_MESSAGE}"
"""What the content of an answer comes after."""

_NAMED = re.compile(r"to=functions\.([^\s<]+)")
_ON = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADERS = (_START, _CHANNEL, "to=", _MESSAGE)
"""What a header may begin with, after white space."""
_MAX_HEADER = 512


class Harmony:
    """A call is a message to a function on the channel for commentary. It ends the answer."""

    name = "harmony"
    markers: tuple[str, ...] = ("<|start|>", _CHANNEL, _MESSAGE, _END, _CONSTRAIN)

    def is_of(self, source: str) -> bool:
        """Whether a template has such channels."""
        return _CHANNEL in source and _MESSAGE in source

    def written(self, calls: Sequence[Call]) -> str:
        """The first call: there is one in a message."""
        first = calls[0]
        arguments = json.dumps(first.arguments, ensure_ascii=False)
        return f"{_CHANNEL}commentary{_TO}{first.name} {_CONSTRAIN}json{_MESSAGE}{arguments}"

    def thought(self, message: str) -> Thought:
        """How an answer reasons on the channel for analysis; `message` comes before a closing that is
        forced."""
        opener = f"{_CHANNEL}analysis{_MESSAGE}"
        return Thought(opener, _END, f"{message}{_END}{_START}", False, reopens=_CHANNEL)

    def grammar(self, rules: Rules, tools: Sequence[ToolSpec], content: str | None) -> str:
        """The grammar of an answer that calls one of the tools or is `content`, a part of a grammar; None: it
        has to call one. Reasoning may come first, and so may text before a call."""
        over = rules.opener(_END + _START, free=True)
        before = [f"{rules.marker(f'{_CHANNEL}analysis{_MESSAGE}')} {over}"]
        answers = []
        for tool in tools:
            arguments = rules.arguments(tool)
            # The function is named with the channel, or with the role before it.
            for header in (
                f"{_CHANNEL}commentary{_TO}{tool.name} {_CONSTRAIN}json{_MESSAGE}",
                f"{_TO}{tool.name}{_CHANNEL}commentary json{_MESSAGE}",
            ):
                answers.append(f"{rules.marker(header)} {arguments}")
        if content is not None:
            before.append(f"{rules.marker(f'{_CHANNEL}commentary{_MESSAGE}')} {over}")
            answers.append(f"{rules.marker(CONTENT)} {content}")
        return "\n".join([f"start: {rules.choice(before)}* {rules.choice(answers)}", *rules.lines, ""])


HARMONY = Harmony()


class ChannelReader:
    """One answer, read as it is written, in pieces of any size.

    Messages on the channel for analysis are reasoning, those to one of the functions `names` are calls, and
    all others are content. Text without a header is content. Fulfils `core.data.AnswerReader`.
    """

    is_forced = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._parts: list[Part] = []
        self._held: list[Character] = []
        self._part: Literal["header", "reasoning", "content", "call"] = "header"
        self._num_calls = 0
        self._is_empty = False
        """whether a call has begun and has no arguments yet"""

    def push(self, *characters: Character) -> list[Part]:
        for text, tokens in characters:
            for character in text:
                self._held.append(Character(character, tokens))
                self._header() if self._part == "header" else self._body()
            if not text:
                self._parts.append(Part(self._kind, "", tokens))
        return self._take()

    def end(self) -> list[Part]:
        begins_header = self._text().lstrip().startswith(("<|", "to="))
        if self._part != "header" or not begins_header:  # the beginning of a header is nothing to show
            self._emit(len(self._held))
        self._close()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    @property
    def _kind(self) -> Kind:
        return "content" if self._part == "header" else self._part

    def _text(self) -> str:
        return "".join(character for character, _ in self._held)

    def _header(self) -> None:
        text = self._text()
        begun = text.lstrip()
        if text.endswith(_MESSAGE):
            self._begin(text)
            self._hide(len(text))
        elif len(text) > _MAX_HEADER or not any(
            begun.startswith(head) or head.startswith(begun) for head in _HEADERS
        ):
            self._part = "content"
            self._emit(len(self._held))

    def _begin(self, header: str) -> None:
        named, channel = _NAMED.search(header), _ON.search(header)
        if named and named[1] in self._names:
            self._part, self._is_empty = "call", True
            self._parts.append(Part("call", "", (), self._num_calls, named[1]))
            self._num_calls += 1
        elif channel and channel[1] == "analysis":
            self._part = "reasoning"
        else:
            self._part = "content"

    def _body(self) -> None:
        text = self._text()
        for marker in (_END, _START, _CHANNEL):
            if text.endswith(marker):
                self._emit(len(text) - len(marker))
                self._close()
                if marker == _END:
                    self._hide(len(marker))
                self._part = "header"
                return
        # The end of the text may be the beginning of a marker.
        for i in range(len(text) + 1):
            if any(marker.startswith(text[i:]) for marker in (_END, _START, _CHANNEL)):
                self._emit(i)
                return

    def _emit(self, count: int) -> None:
        """So many of the characters that were held back are no part of a marker."""
        characters, self._held = self._held[:count], self._held[count:]
        is_call = self._part == "call"
        self._is_empty = self._is_empty and not (is_call and characters)
        self._parts += shown(self._kind, characters, self._num_calls - 1 if is_call else -1)

    def _hide(self, count: int) -> None:
        """So many of them are a header or a marker of this part."""
        self._parts += hidden(self._kind, self._held[:count])
        del self._held[:count]

    def _close(self) -> None:
        if self._part == "call" and self._is_empty:
            self._parts.append(Part("call", "{}", (), self._num_calls - 1))
            self._is_empty = False
