"""An answer split into content, reasoning and tool calls while it is being written, character by character.
Text is held back only as long as it may turn out to be something else than content."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal, TypeVar

from outrider.core.data import Character, Kind, Part
from outrider.formats.conversation import ReasoningMarkers, ToolSpec

# Scans: coroutines that are sent characters. One ends with the last that it needs, and raises `Refused` for a
# character that does not fit.

_Result = TypeVar("_Result")
Scan = Generator[None, str, _Result]

BLANKS = " \t\r\n"
_MAX_SHORT = 512
_OUTSIDE_STRINGS = frozenset("{}[],:+-." + BLANKS)


class Refused(Exception):
    """The text is not what the scan reads."""


def expect(holds: bool) -> None:
    """Go on, or refuse the text."""
    if not holds:
        raise Refused


def blank() -> Scan[str]:
    """White space, and the first character after it."""
    while (character := (yield)) in BLANKS:
        pass
    return character


def one_of(words: Collection[str], closing: str) -> Scan[str]:
    """One of these words and the character that closes it."""
    word = ""
    while (character := (yield)) != closing:
        word += character
        expect(any(known.startswith(word) for known in words))
    expect(word in words)
    return word


def either(texts: Sequence[str], read: str = "") -> Scan[int]:
    """Which of these texts comes next; `read` has come of it. White space does not matter."""
    wanted = ["".join(text.split()) for text in texts]
    found = read.strip()
    while found not in wanted:
        expect(any(text.startswith(found) for text in wanted))
        found += (yield).strip()
    return wanted.index(found)


def until(end: str) -> Scan[str]:
    """A short text up to this one, which comes after it."""
    text = ""
    while not text.endswith(end):
        text += yield
        expect(len(text) <= _MAX_SHORT)
    return text.removesuffix(end)


def text_up_to(before: str, end: str, take: Callable[[str], None], read: str = "") -> Scan[None]:
    """Any text up to `end`; `before` belongs to the end where it comes before it, and `read` has come
    already. `take` is given pieces of the text as soon as they are no part of the end."""
    held = read
    while not held.endswith(end):
        for i in range(len(held) + 1):
            if (before + end).startswith(held[i:]) or end.startswith(held[i:]):
                break
        if i:
            take(held[:i])
        held = held[i:] + (yield)
    if text := held.removesuffix(end).removesuffix(before):
        take(text)


def value(first: str, take: Callable[[str], None]) -> Scan[None]:
    """An object, a list or a string as it is written, from its first character on. Brackets and strings
    are counted; what cannot be outside strings is refused."""
    depth, quoted, character = 0, False, first
    while True:
        if quoted:
            if character == "\\":
                take(character)
                character = yield
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        else:
            expect(character in _OUTSIDE_STRINGS or (character.isascii() and character.isalnum()))
            depth += (character in "{[") - (character in "}]")
        take(character)
        if not depth and not quoted:
            return
        character = yield


# Answers

_MAX_HELD = 16_384
"""Characters that may wait for it to become certain that they are a call."""


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
    Calls are looked for if there are `tools`, and end the answer. A call is certain with its name. What turns
    out to be no call is content, unless it `must_call`. A call that breaks off keeps what has come of it, and
    its beginning is no content. White space next to markers and calls belongs to them.
    """

    scan_from: Callable[[str, Reader], Scan[None] | None]
    tools: Mapping[str, ToolSpec]
    markers: ReasoningMarkers
    opened: InitVar[bool]
    must_call: bool = False
    is_forced: bool = False
    is_line_start: bool = True
    _parts: list[Part] = field(default_factory=list)
    _phase: Literal["before", "reasoning", "answer"] = "before"
    _expected: tuple[str, ...] = ()
    """markers of the reasoning that may come"""
    _tokens: tuple[int, ...] = ()
    """those of the character that is being read"""
    _scan: Scan[None] | None = None
    _scans_marker: bool = False
    _is_no_marker: bool = False
    """whether the next character was found to begin none"""
    _held: list[Character] = field(default_factory=list)
    """what the scan has read and is not certain of"""
    _is_call: bool = False
    """whether it cannot be anything but a call any more"""
    _blanks: list[Character] = field(default_factory=list)
    _skips_blanks: bool = False
    """whether they belong to a marker of the reasoning, or a call, before them"""
    _num_calls: int = 0
    _is_open: bool = False
    """whether a call has begun and not ended"""
    _is_empty: bool = False
    """whether it has no arguments yet"""

    def __post_init__(self, opened: bool) -> None:
        self._expected = self.markers[:1]
        if opened:
            self._phase, self._expected, self._skips_blanks = "reasoning", self.markers, True

    def push(self, *characters: Character) -> list[Part]:
        for text, tokens in characters:
            if text:
                self._read([Character(character, tokens) for character in text])
            else:
                self._parts.append(Part("call" if self._num_calls else self._kind, "", tokens))
        return self._take()

    def end(self) -> list[Part]:
        self._skips_blanks = self._skips_blanks and self._phase == "answer"
        while self._scan is not None and not self._is_open:
            if (self._is_call or self._num_calls or self.must_call) and self._phase != "reasoning":
                self._hide("call", self._held)
                break
            self._read(self._give_up())
        self._hide("call", self._held)
        if self._num_calls or self._skips_blanks:
            self._hide("call" if self._num_calls else "reasoning", self._blanks)
        else:
            self._emit(self._blanks)
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # What a scan finds

    def certain(self) -> None:
        """What is being read can be nothing but a call."""
        self._is_call = True

    def begin(self, name: str) -> None:
        """A call of this name begins."""
        expect(bool(name))
        self._parts.append(Part("call", "", (), self._num_calls, name))
        self._hide("call", self._blanks)
        self._hide("call", self._held)
        self._num_calls += 1
        self._is_open = self._is_empty = True
        self.is_line_start = False

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        self._is_empty = False
        self._parts += shown("call", [Character(text, self._tokens)], self._num_calls - 1)
        self._hide("call", self._held)

    def close(self) -> None:
        """The call is complete."""
        if self._is_empty:
            self.arguments("{}")
        self._is_open, self._skips_blanks = False, True
        self._hide("call", self._held)

    # Characters

    def _read(self, characters: Iterable[Character]) -> None:
        queue = deque(characters)
        while queue:
            character = queue.popleft()
            self._tokens = character.tokens
            if self._scan is None:
                scan = self._scan_from(character[0])
                if scan is None:
                    self._write(character)
                    continue
                self._scan, self._is_call = scan, False
                self._held.append(character)
                next(scan)
                continue
            self._held.append(character)
            try:
                expect(len(self._held) <= _MAX_HELD)
                self._scan.send(character[0])
            except StopIteration:
                self._scan = None
                self._hide("call", self._held)
            except Refused:
                queue.extendleft(reversed(self._give_up()))

    def _scan_from(self, first: str) -> Scan[None] | None:
        """What reads a marker or a call that may begin with this character."""
        if self._phase == "before" and first not in BLANKS + self.markers.opener[0]:
            self._phase, self._expected = "answer", ()
        begun = [m for m in self._expected if m.startswith(first) and not self._is_no_marker]
        self._scans_marker, self._is_no_marker = bool(begun), False
        if begun or self._phase != "answer":
            return self._scan_marker(begun) if begun else None
        return self.scan_from(first, self) if self.tools else None

    def _scan_marker(self, begun: list[str]) -> Scan[None]:
        last = begun[0][-1]
        word = yield from one_of([marker[1:-1] for marker in begun], last)
        if self._phase == "answer" and len(self._expected) == 1:  # content has come
            self._emit(self._blanks)
        self._hide("reasoning", self._blanks)
        self._hide("reasoning", self._held)
        if self.markers.opener.endswith(word + last):
            self._phase, self._expected = "reasoning", self.markers[1:]
        else:
            may_follow = self.is_forced and self._phase == "reasoning"
            self._phase, self._expected = "answer", self.markers if may_follow else ()
        self._skips_blanks = True

    def _give_up(self) -> list[Character]:
        """What the scan was not certain of, to be read as something else."""
        held, self._held, self._scan, self._is_open = self._held, [], None, False
        self._is_no_marker = self._scans_marker
        if self._phase == "before":
            self._phase, self._expected = "answer", ()
        elif held and not self._scans_marker:
            self._write(held.pop(0))
        return held

    def _write(self, character: Character) -> None:
        if character[0] in BLANKS and (self.tools or self._skips_blanks or self._phase != "answer"):
            self._blanks.append(character)
            self.is_line_start = self.is_line_start or character[0] == "\n"
            return
        if self._skips_blanks:
            self._hide("call" if self._num_calls else "reasoning", self._blanks)
        self._emit([*self._blanks, character])
        self._blanks.clear()
        self._skips_blanks = False
        self._expected = self._expected[-1:]
        self.is_line_start = self.is_line_start and self._phase == "reasoning"

    def _emit(self, characters: list[Character]) -> None:
        self._parts += shown(self._kind, characters)
        characters.clear()

    def _hide(self, kind: Kind, characters: list[Character]) -> None:
        self._parts += hidden(kind, characters)
        characters.clear()

    @property
    def _kind(self) -> Kind:
        return "reasoning" if self._phase == "reasoning" else "content"
