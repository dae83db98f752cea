"""Text read one character at a time: no more is held back than is uncertain.

Every scan is a coroutine that is sent characters. It ends with the last one that it needs, and raises
`Refused` for one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

_Result = TypeVar("_Result")
Scan = Generator[None, str, _Result]

BLANKS = " \t\r\n"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MAX_SHORT = 512
_OUTSIDE_STRINGS = frozenset("{}[],:+-." + BLANKS)


class Refused(Exception):
    """The text is not what the scan reads."""


def expect(holds: bool) -> None:
    """Go on, or refuse the text."""
    if not holds:
        raise Refused


def literal(text: str) -> Scan[None]:
    """Exactly this text."""
    for wanted in text:
        expect((yield) == wanted)


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


def string(take: Callable[[str], None]) -> Scan[None]:
    """A string after its opening quote; `take` is given its characters, escapes resolved."""
    held = ""  # the first half of a surrogate pair waits for the other
    while (character := (yield)) != '"':
        if character == "\\":
            character = yield
            character = (yield from _unicode()) if character == "u" else _ESCAPES.get(character, character)
        held += character
        if not "\ud800" <= character <= "\udbff":
            take(_whole(held))
            held = ""
    if held:
        take(_whole(held))


def _whole(text: str) -> str:
    """Pairs of surrogates as one character, and halves of them as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unicode() -> Scan[str]:
    digits = ""
    while len(digits) < 4:
        digits += yield
        expect(digits[-1] in "0123456789abcdefABCDEF")
    return chr(int(digits, 16))


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


def skip(first: str) -> Scan[str]:
    """A value that is not used, and the first character after it that is not blank."""
    if first in '{["':
        yield from value(first, lambda _: None)
        return (yield from blank())
    character = first
    while character not in ",}" + BLANKS:
        expect(character.isascii() and (character.isalnum() or character in "+-."))
        character = yield
    return (yield from blank()) if character in BLANKS else character
