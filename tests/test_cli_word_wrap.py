"""Answers in a terminal break between words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.stream import WordWrap


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(lambda: width)
    shown = [text for piece in pieces for text, _ in wrap.feed([(piece, "")])]
    return "".join([*shown, *(text for text, _ in wrap.end())])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four", "one two\nthree four"),
        ("one  two\n\nthree", "one  two\n\nthree"),
        ("a-word-longer-than-a-line is here", "a-word-longer-than-a-line is\nhere"),
        ("```\nlong line = of code\n```\none two three", "```\nlong line = of code\n```\none two\nthree"),
        ("    first = second + third", "    first = second + third"),
        ("| one | two | three |", "| one | two | three |"),
        ('{"one": "two three four"}', '{"one": "two three four"}'),
        ("\u6f22" * 12, "\u6f22" * 12),
        ("one two \u6f22\u6f22 three", "one two \u6f22\u6f22 three"),
    ],
)
def test_lines_break_between_words(text: str, expected: str) -> None:
    assert wrapped([text], 10) == wrapped(list(text), 10) == expected


@given(st.lists(st.text("ab \n\t`|\u6f22")), st.integers(1, 12))
def test_nothing_but_blanks_changes_wherever_the_text_is_cut(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width) and shown.split() == text.split()


def test_a_word_is_shown_when_it_is_whole_in_its_colours() -> None:
    wrap = WordWrap(lambda: 10)
    assert wrap.feed([("one t", "red"), ("w", "green")]) == [("one", "red")]
    assert wrap.feed([("o ", "")]) == [(" t", "red"), ("w", "green"), ("o", "")]
    assert wrap.end() == [(" ", "")]
