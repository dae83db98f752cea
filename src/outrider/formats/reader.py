"""An answer split into content, reasoning and tool calls while it is being written, character by character.
Text is held back only as long as it may turn out to be something else than content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Literal

from outrider.core.data import Character, Kind, Part
from outrider.formats.grammar import ReasoningMarkers
from outrider.formats.syntaxes import Begun, CallSyntax, Types

_BLANKS = " \t\r\n"
_MAX_HELD = 512
"""Characters that may wait for it to become certain that they are a call: some models write white space
without end."""


def shown(kind: Kind, characters: Iterable[Character], call: int = -1) -> list[Part]:
    """Characters as parts of this kind, or of the arguments of a call."""
    return [Part(kind, *character, call) for character in characters]


def hidden(kind: Kind, characters: Iterable[Character]) -> list[Part]:
    """Characters that are not shown, and belong to what is of this kind."""
    return [Part(kind, "", tokens) for _, tokens in characters]


@dataclass(slots=True)
class Reader:
    """One answer, read as it is written, in pieces of any size: the parts that come of them, joined, are
    the same. Fulfils `core.data.AnswerReader`.

    Reasoning may come before the answer. `opened` says that the prompt ends inside it; an opener is then
    passed over. After an end that was forced it may end once more, and begin again before any content.
    Calls are looked for if there are `tools`, by name with the types of their parameters, and end the answer.
    A call is certain with its name. One that breaks off keeps what has come of it, and its beginning is no
    content. White space next to markers and calls belongs to them.
    """

    syntax: CallSyntax
    tools: Types
    markers: ReasoningMarkers
    opened: InitVar[bool]
    must_call: bool = False
    is_forced: bool = False
    _parts: list[Part] = field(default_factory=list)
    _phase: Literal["before", "reasoning", "answer", "calls"] = "before"
    _expected: tuple[str, ...] = ()
    """markers of the reasoning that may come"""
    _held: list[Character] = field(default_factory=list)
    """what may be the beginning of a marker or a call"""
    _is_line_start: bool = True
    _blanks: list[Character] = field(default_factory=list)
    _skips_blanks: bool = False
    """whether they belong to a marker of the reasoning before them"""
    _text: str = ""
    """of the calls"""
    _arguments: list[str] = field(default_factory=list)
    """those that were given out, of each call"""

    def __post_init__(self, opened: bool) -> None:
        self._expected = self.markers[:1]
        if opened:
            self._phase, self._expected, self._skips_blanks = "reasoning", self.markers, True

    def push(self, *characters: Character) -> list[Part]:
        for text, tokens in characters:
            if not text:
                self._parts.append(Part(self._kind, "", tokens))
            for i, character in enumerate(text):
                if self._phase == "calls":
                    self._call(Character(text[i:], tokens))
                    break
                self._held.append(Character(character, tokens))
                self._sort()
        return self._take()

    def end(self) -> list[Part]:
        self._skips_blanks = self._skips_blanks and self._phase == "answer"
        while self._held:
            is_call = self.must_call or self._begun == "certain"
            if is_call and self._phase != "reasoning":
                self._hide("call", self._held)
                break
            if self._phase == "before":
                self._phase, self._expected = "answer", ()
            self._write(self._held.pop(0))
            self._sort()
        if self._phase == "calls" or self._skips_blanks:
            self._hide("call" if self._phase == "calls" else "reasoning", self._blanks)
        else:
            self._emit(self._blanks)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _sort(self) -> None:
        """Tell what is held: a marker or calls, perhaps one of them, or something else."""
        while self._held:
            text = "".join(character for character, _ in self._held)
            marker = next((marker for marker in self._expected if marker.startswith(text)), None)
            if marker is not None:
                if marker != text:
                    return
                self._pass(marker)
            elif self._phase == "before" and text not in _BLANKS:
                self._phase, self._expected = "answer", ()
            elif (begun := self._begun) == "yes":
                self._hide("call", self._blanks)
                self._phase = "calls"
                self._text = "" if text[0] != "{" else text
                self._hide("call", self._held)
                self._call(Character("", ()))
            elif begun != "no":
                return
            else:
                self._write(self._held.pop(0))

    @property
    def _begun(self) -> Begun:
        """Whether what is held begins a call."""
        if self._phase != "answer" or not self.tools:
            return "no"
        text = "".join(character for character, _ in self._held)
        begun = self.syntax.begun(text, self.tools, is_line_start=self._is_line_start)
        return "no" if begun == "perhaps" and len(text) > _MAX_HELD else begun

    def _pass(self, marker: str) -> None:
        if self._phase == "answer" and len(self._expected) == 1:  # content has come
            self._emit(self._blanks)
        self._hide("reasoning", self._blanks)
        self._hide("reasoning", self._held)
        if marker == self.markers.opener:
            self._phase, self._expected = "reasoning", self.markers[1:]
        else:
            may_follow = self.is_forced and self._phase == "reasoning"
            self._phase, self._expected = "answer", self.markers if may_follow else ()
        self._skips_blanks = True

    def _call(self, character: Character) -> None:
        """Read more of the calls, and give out what has come of them."""
        self._text += character.text
        num_parts = len(self._parts)
        for i, (name, arguments) in enumerate(self.syntax.read(self._text, self.tools)):
            if i == len(self._arguments):
                self._parts.append(Part("call", "", (), i, name))
                self._arguments.append("")
            if more := arguments[len(self._arguments[i]) :]:
                self._parts += shown("call", [Character(more, character.tokens)], i)
                self._arguments[i] = arguments
        if character.text and not any(part.text for part in self._parts[num_parts:]):
            self._parts += hidden("call", [character])

    def _write(self, character: Character) -> None:
        if character.text in _BLANKS and (self.tools or self._skips_blanks or self._phase != "answer"):
            self._blanks.append(character)
            self._is_line_start = self._is_line_start or character.text == "\n"
            return
        if self._skips_blanks:
            self._hide("reasoning", self._blanks)
        self._emit([*self._blanks, character])
        self._blanks.clear()
        self._skips_blanks = False
        self._expected = self._expected[-1:]
        self._is_line_start = self._is_line_start and self._phase == "reasoning"

    def _emit(self, characters: list[Character]) -> None:
        self._parts += shown(self._kind, characters)
        characters.clear()

    def _hide(self, kind: Kind, characters: list[Character]) -> None:
        self._parts += hidden(kind, characters)
        characters.clear()

    @property
    def _kind(self) -> Kind:
        if self._phase == "calls":
            return "call"
        return "reasoning" if self._phase == "reasoning" else "content"
