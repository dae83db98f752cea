"""Text comes out whole: no half character, no part of a stop string, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core.errors import SettingError
from outrider.engine.text import TextStream
from vocabularies import TableVocabulary, Token, bytes_and

BYTES = TableVocabulary(
    [
        *bytes_and(),
        Token(b"<c>", control=True),
        Token(b"<end>", control=True, end=True),
        Token(b"</s>", end=True),
    ]
)
CONTROL, END, TEXT_END = 256, 257, 258


def pieces_of(*parts: bytes) -> TableVocabulary:
    """A vocabulary whose token i is the i-th of these pieces."""
    return TableVocabulary([Token(part) for part in parts])


def run(
    vocabulary: TableVocabulary, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(vocabulary, stop)
    return [*(stream.push(token) for token in tokens), stream.flush()], stream


def test_a_character_comes_out_with_its_last_byte() -> None:
    shown, _ = run(BYTES, list("né😀".encode()))
    assert shown == ["n", "", "é", "", "", "", "😀", ""]


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    assert run(BYTES, [*b"ok", 0xF0, 0x9F])[0] == ["o", "k", "", "", "\ufffd"]


def test_end_and_control_tokens_add_nothing_even_inside_a_character() -> None:
    shown, stream = run(BYTES, [0xC3, CONTROL, 0xA9, TEXT_END, END])
    assert "".join(shown) == "é"
    assert stream.stopped is None


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    vocabulary = pieces_of(b"yes.\nUs", b"er", b": more", b"tail")
    shown, stream = run(vocabulary, [0, 1, 2, 3], ("\nUser:",))
    assert shown == ["yes.", "", "", "", ""]
    assert stream.stopped == "\nUser:"


def test_what_only_looked_like_a_stop_string_comes_out_after_all() -> None:
    shown, stream = run(pieces_of(b"a<", b"b", b"<"), [0, 1, 2], ("</s>",))
    assert shown == ["a", "<b", "", "<"]
    assert stream.stopped is None


def test_the_stop_string_that_starts_first_wins_whatever_the_order() -> None:
    for stop in [("cd", "bc"), ("bc", "cd")]:
        shown, stream = run(pieces_of(b"abcde"), [0], stop)
        assert ("".join(shown), stream.stopped) == ("a", "bc")


def test_one_string_is_one_stop() -> None:
    stream = TextStream(BYTES, "end")
    assert "".join(stream.push(token) for token in b"need to end") == "need to "
    assert stream.stopped == "end"


@pytest.mark.parametrize("stop", ["", ("a", "")])
def test_an_empty_stop_string_is_refused(stop: str | tuple[str, ...]) -> None:
    with pytest.raises(SettingError, match="empty stop string"):
        TextStream(BYTES, stop)


# Few letters, so that stop strings overlap; lone and paired bytes of é and 😀, so that they break.
_piece = st.lists(
    st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xff"]), max_size=4
)
_stop = st.text(alphabet="abé😀\ufffd", min_size=1, max_size=4)


@given(st.lists(_piece.map(b"".join), max_size=10), st.lists(_stop, max_size=4).map(tuple))
@example([b"a", b"b", b"a", b"\xc3\xa9"], ("abaé", "ba"))
def test_releases_joined_are_the_text_up_to_the_first_stop(parts: list[bytes], stop: tuple[str, ...]) -> None:
    shown, stream = run(pieces_of(*parts), list(range(len(parts))), stop)
    text = b"".join(parts).decode("utf-8", errors="replace")
    starts = [(text.find(s), len(s)) for s in stop if s in text]
    if starts:
        start, length = min(starts)
        assert stream.stopped == text[start : start + length]
        text = text[:start]
    else:
        assert stream.stopped is None
    assert "".join(shown) == text


@given(st.lists(_piece.map(b"".join), max_size=10))
def test_nothing_is_held_without_need(parts: list[bytes]) -> None:
    shown, _ = run(pieces_of(*parts), list(range(len(parts))), ("zz",))
    whole = b"".join(parts)
    complete = "".join(shown[:-1])
    # At most one unfinished character waits for the end.
    assert len(whole.decode("utf-8", errors="replace")) - len(complete) <= 1
