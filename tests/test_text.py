"""Text comes out whole: no half character, no part of a stop string, nothing lost."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from formats_samples import TOOLS, chat_format
from outrider.core.data import TARGET, Piece, Request, TokenLogprob, content_of
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
    return [content_of(pieces) for pieces in (*map(stream.push, tokens), stream.flush())], stream


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


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(SettingError, match="empty stop string"):
        Request((1,), stop=("a", ""))


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


# What an answer is made of

THINKING = chat_format("thinking")


def answer(*texts: bytes, stop: tuple[str, ...] = (), prompt: str = "<think>") -> TextStream:
    """The stream of an answer that reasons and may call tools; its tokens are these texts."""
    reader = partial(THINKING.reader, TOOLS, prompt=prompt)
    return TextStream(pieces_of(*texts), stop, reader=reader)


def pieces(stream: TextStream, number: int, sources: str = "") -> list[Piece]:
    found = []
    for token in range(number):
        source = sources[token] if sources else TARGET
        found += stream.push(token, source, TokenLogprob(token, -float(token)))
    return found + stream.flush()


def test_pieces_have_their_kind_source_tokens_and_log_probabilities() -> None:
    texts = (
        *(b"a", b"b", b"</think>\n\nc", b" d", b'<tool_call>{"name": "get", ', b'"arguments": {"a'),
        *(b'": 1}}', b"\n</tool_call>"),
    )
    stream = answer(*texts)
    found = pieces(stream, len(texts), "tmlttgmt")
    assert [(p.kind, p.name or p.text, p.source, p.tokens) for p in found] == [
        ("reasoning", "a", "t", (0,)),
        ("reasoning", "b", "m", (1,)),
        ("content", "c", "l", (2,)),
        ("content", " d", "t", (3,)),
        ("call", "get", TARGET, ()),
        ("call", '{"a', "g", (5,)),
        ("call", '": 1}', "m", (6,)),
    ]
    assert all(tuple(one.token for one in piece.logprobs) == piece.tokens for piece in found)
    assert stream.kinds == (*["reasoning"] * 2, *["content"] * 2, *["call"] * 4)


def test_a_character_that_is_cut_has_all_its_tokens() -> None:
    stream = TextStream(pieces_of(b"a\xf0", b"\x9f", b"\x98", b"\x80b", b"\xc3"))
    found = [(piece.text, piece.tokens) for token in range(5) for piece in stream.push(token)]
    assert found == [("a", (0,)), ("😀b", (1, 2, 3))]
    assert [(piece.text, piece.tokens) for piece in stream.flush()] == [("\ufffd", (4,))]


def test_a_stop_string_ends_the_content_alone() -> None:
    call = b'<tool_call>{"name": "get", "arguments": {"text": "x"}}</tool_call>'
    stream = answer(b"x", b"ax</think>", b"\n\n", b"a", call, stop=("x", "\n\n"))
    assert [(p.kind, p.text) for p in pieces(stream, 5) if not p.name] == [
        *(("reasoning", "x"), ("reasoning", "ax"), ("content", "a"), ("call", '{"text": "x"}'))
    ]
    assert stream.stopped is None
    stream = answer(b"x</think>", b"a", b"b\nx", b"y", stop=("x", "\n\n"))
    found = pieces(stream, 3)
    assert [(p.kind, p.text) for p in found] == [("reasoning", "x"), ("content", "a"), ("content", "b\n")]
    assert stream.stopped == "x" and stream.push(3) == [] == stream.flush()
    assert [token for piece in found for token in piece.tokens] == [0, 1, 2] and len(stream.kinds) == 4


# Tokens of a few bytes, which cut characters, markers and calls anywhere.
_ANSWER = (
    'é😀</think>\n\na 😀b<tool_call>\n{"name": "get", "arguments": {"text": "é"}}\n</tool_call> c <b'.encode()
)


@given(st.lists(st.integers(1, len(_ANSWER) - 1)), st.lists(_stop, max_size=3).map(tuple), st.data())
def test_every_token_is_in_one_piece_at_most_and_of_one_kind(
    cuts: list[int], stop: tuple[str, ...], data: st.DataObject
) -> None:
    cuts = sorted({*cuts, 0, data.draw(st.integers(1, len(_ANSWER)))})
    texts = [_ANSWER[a:b] for a, b in pairwise(cuts)]
    stream, whole = answer(*texts, stop=stop), answer(_ANSWER[: cuts[-1]], stop=stop)
    found, expected = pieces(stream, len(texts)), pieces(whole, 1)
    for kind in ("content", "reasoning", "call"):
        assert joined(found, kind) == joined(expected, kind)
    assert stream.stopped == whole.stopped and len(stream.kinds) == len(texts)
    shown = [token for piece in found for token in piece.tokens]
    assert shown == sorted(set(shown))
    assert all(stream.kinds[token] == piece.kind for piece in found for token in piece.tokens)


def joined(found: list[Piece], kind: str) -> str:
    return "".join(piece.name + piece.text for piece in found if piece.kind == kind)
