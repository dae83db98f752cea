"""An answer split into content, reasoning and tool calls while it is being written, character by character.

Text is held back only as long as it may turn out to be something else than content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Literal

from outrider.core.data import Character, Kind, Part
from outrider.formats.conversation import ReasoningMarkers, ToolSpec
from outrider.formats.scan import BLANKS, Refused, Scan, expect, one_of

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
    Calls are looked for if there are `tools`. A call is certain with its name and the first character of its
    arguments. What turns out to be no call is content, unless it `must_call`. A call that breaks off keeps
    what has come of it, and its beginning is no content. White space next to markers and calls belongs to
    them, unless there is text on both sides.
    """

    scan_from: Callable[[str, Reader], Scan[None] | None]
    tools: Mapping[str, ToolSpec]
    markers: ReasoningMarkers
    opened: InitVar[bool]
    must_call: bool = False
    is_forced: bool = False
    is_after_call: bool = False
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
    _scanned_calls: int = 0
    """those that the scan has begun"""
    _held: list[Character] = field(default_factory=list)
    """what the scan has read and is not certain of"""
    _is_call: bool = False
    """whether it cannot be anything but a call any more"""
    _blanks: list[Character] = field(default_factory=list)
    _skips_blanks: bool = False
    """whether they belong to a marker of the reasoning before them"""
    _num_kept_blanks: int = 0
    """those before a call"""
    is_line_start: bool = True
    _has_content: bool = False
    _is_last_call: bool = False
    """whether no content has followed a call"""
    _num_calls: int = 0
    _name: str = ""
    _early: list[Character] = field(default_factory=list)
    """arguments that came before the name"""
    _is_open: bool = False
    """whether a call has begun and not ended"""

    def __post_init__(self, opened: bool) -> None:
        self._expected = self.markers[:1]
        if opened:
            self._phase, self._expected, self._skips_blanks = "reasoning", self.markers, True

    def push(self, *characters: Character) -> list[Part]:
        for text, tokens in characters:
            if text:
                self._read([Character(character, tokens) for character in text])
            else:
                self._parts.append(Part("call" if self._is_last_call else self._kind, "", tokens))
        return self._take()

    def end(self) -> list[Part]:
        self._skips_blanks = self._skips_blanks and self._phase == "answer"
        while self._scan is not None and not self._is_open:
            is_call = self._is_call or self._is_last_call or self.must_call
            if is_call and self._phase != "reasoning":
                if self._name:
                    self._begin_call()
                self._hide("call", self._held)
                break
            self._read(self._give_up())
        if self._is_last_call or self._skips_blanks:
            self._hide("call" if self._is_last_call else "reasoning", self._blanks)
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

    def name(self, name: str) -> None:
        expect(bool(name) and not self._is_open and not self._name)
        self._name = name
        if self._early:
            self._begin_call()

    def arguments(self, text: str) -> None:
        character = Character(text, self._tokens)
        if not self._name:
            self._early.append(character)
            return
        if not self._is_open:
            self._begin_call()
        self._parts += shown("call", [character], self._num_calls - 1)
        self._hide("call", self._held)

    def close(self) -> None:
        if not self._is_open:
            expect(bool(self._name))
            self.arguments("{}")
        self._is_open, self._name, self.is_after_call = False, "", True
        self._hide("call", self._held)

    def drop(self) -> None:
        self._hide("call", self._held)
        self.is_after_call = False
        kept, self._blanks = self._blanks[: self._num_kept_blanks], self._blanks[self._num_kept_blanks :]
        self._hide("call", self._blanks)
        self._blanks = kept

    def _begin_call(self) -> None:
        """The call is certain: its name, and arguments that came before it."""
        self._parts.append(Part("call", "", (), self._num_calls, self._name))
        self._parts += shown("call", self._early, self._num_calls)
        self._early.clear()
        self._hide("call", self._held)
        self._num_calls += 1
        self._scanned_calls += 1
        self._is_open = self._is_last_call = True
        self.is_line_start = False
        if not self._has_content:
            self._hide("call", self._blanks)
        self._num_kept_blanks = len(self._blanks)

    def _hide(self, kind: Kind, characters: list[Character]) -> None:
        """Characters that were held back are not shown."""
        self._parts += hidden(kind, characters)
        characters.clear()

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
                self._scan, self._scanned_calls, self._is_call = scan, 0, False
                self._held.append(character)
                next(scan)
                continue
            self._held.append(character)
            try:
                expect(len(self._held) <= _MAX_HELD)
                self._scan.send(character[0])
            except StopIteration:
                self._scan = None
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
        if self._has_content:
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
        held, self._held, self._early, self._scan = self._held, [], [], None
        self.is_after_call = self.is_after_call or self._is_open
        self._is_open, self._name = False, ""
        self._is_no_marker = self._scans_marker
        if self._phase == "before":
            self._phase, self._expected = "answer", ()
        elif self._scans_marker:
            pass  # it may begin something else
        elif held and not self._scanned_calls:
            self._write(held.pop(0))
        return held

    def _write(self, character: Character) -> None:
        """A character of the reasoning or the content."""
        if character[0] in BLANKS and (self.tools or self._skips_blanks or self._phase != "answer"):
            self._blanks.append(character)
            self.is_line_start = self.is_line_start or character[0] == "\n"
            return
        if not self._skips_blanks and (self._has_content or not self._num_calls):
            self._emit(self._blanks)
        self._hide("reasoning" if self._skips_blanks else "call", self._blanks)
        self._emit([character])
        self._num_kept_blanks, self._skips_blanks = 0, False
        self._expected = self._expected[-1:]
        if self._phase != "reasoning":
            self.is_line_start, self._has_content, self._is_last_call = False, True, False

    def _emit(self, characters: list[Character]) -> None:
        self._parts += shown(self._kind, characters)
        characters.clear()

    @property
    def _kind(self) -> Kind:
        """What text is, here."""
        return "reasoning" if self._phase == "reasoning" else "content"
