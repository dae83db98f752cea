"""Which pairs of tokenizers line up, and which token is mapped to which."""

from string import ascii_lowercase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import VocabularyMismatch
from outrider.models.vocab import Alignment, align, compare
from vocabularies import TableVocabulary, Token, bytes_and

WORDS = ("the", " the", "er", "ing", "1969", "600", "000", "  ", "    ", "def", "return", "re", "в", "的")
END = Token(b"<end>", control=True, end=True)
PAD = Token(b"[PAD]", control=True)


def test_the_same_tokens_under_the_same_ids_need_no_mapping() -> None:
    alignment = align(TableVocabulary([*bytes_and(*WORDS), END]), TableVocabulary([*bytes_and(*WORDS), END]))
    assert alignment.identical
    assert alignment.to_target.tolist() == alignment.to_draft.tolist() == list(range(256 + len(WORDS) + 1))
    assert alignment.report.text_ratio == alignment.report.cut_ratio == 1
    with pytest.raises(ValueError, match="read-only"):
        alignment.to_target[0] = 1


def test_padding_on_one_side_leaves_a_pair_usable() -> None:
    base = [*bytes_and(*WORDS), END]
    target, draft = TableVocabulary([*base, PAD, PAD, PAD]), TableVocabulary(base)
    alignment = align(target, draft)
    assert not alignment.identical
    assert alignment.to_target.tolist() == list(range(len(base)))
    assert alignment.to_draft.tolist() == [*range(len(base)), -1, -1, -1]
    assert alignment.report.common_tokens == len(base)


def test_other_special_tokens_shift_ids_without_harm() -> None:
    text = bytes_and(*WORDS)
    target = TableVocabulary([Token(b"<s>", control=True), END, *text])
    draft = TableVocabulary([*text, END, Token(b"<tool>", control=True)])
    alignment = align(target, draft)
    assert alignment.to_target.tolist() == [*range(2, len(text) + 2), 1, -1]
    assert alignment.to_draft[0] == -1
    assert alignment.report.text_ratio == 1


@pytest.mark.parametrize("other", [Token(b"<0x0A>", piece=b"\n"), Token(b"<0x0A>", end=True)])
def test_the_same_spelling_with_other_bytes_or_another_end_is_another_token(other: Token) -> None:
    text = bytes_and(*WORDS)
    alignment = align(TableVocabulary([*text, other]), TableVocabulary([*text, Token(b"<0x0A>")]))
    assert alignment.to_target[-1] == alignment.to_draft[-1] == -1
    assert not alignment.identical


def test_tokenizers_of_different_kinds_are_compared_byte_by_byte() -> None:
    text = bytes_and(*WORDS)
    odd = [*text[:257], Token(b" the", piece=b"\xc4\xa0the"), *text[258:]]
    alignment = compare(TableVocabulary(text, kind="bpe"), TableVocabulary(odd, kind="spm"))
    assert np.flatnonzero(alignment.to_target < 0).tolist() == [257]


def test_one_odd_token_has_every_token_looked_at() -> None:
    text = bytes_and(*WORDS)
    odd = [*text[:256], Token(b"the", piece=b"THE"), Token(b" the", piece=b" THE"), *text[258:]]
    alignment = compare(TableVocabulary(text), TableVocabulary(odd))
    assert np.flatnonzero(alignment.to_target < 0).tolist() == [256, 257]


def test_doubles_map_only_to_their_own_id() -> None:
    text = bytes_and(*WORDS)
    target, draft = [*text, PAD, PAD, END], [*text, PAD, END, PAD]
    alignment = align(TableVocabulary(target), TableVocabulary(draft))
    first = len(text)
    assert alignment.to_target[first:].tolist() == [first, first + 2, -1]
    assert alignment.to_draft[first:].tolist() == [first, -1, first + 1]


def test_too_few_common_tokens_are_refused() -> None:
    target = TableVocabulary(bytes_and(*WORDS), kind="bpe (one)")
    draft = TableVocabulary(bytes_and(*(f"~{word}" for word in WORDS)), kind="bpe (two)")
    with pytest.raises(VocabularyMismatch) as caught:
        align(target, draft)
    message = str(caught.value)
    assert "bpe (one)" in message and "bpe (two)" in message
    assert "256 of 270 text tokens" in message
    assert caught.value.way_out


def test_the_same_tokens_cut_in_another_way_are_refused() -> None:
    pairs = bytes_and(*(a + b for a in f"{ascii_lowercase} " for b in f"{ascii_lowercase} "))
    target, draft = TableVocabulary(pairs), TableVocabulary(pairs, words="(?s).")
    assert compare(target, draft).report.text_ratio == 1
    with pytest.raises(VocabularyMismatch, match="of sample text is cut alike"):
        align(target, draft)


def test_a_few_pieces_cut_in_another_way_are_tolerated() -> None:
    tokens = bytes_and(*WORDS)
    report = align(TableVocabulary(tokens), TableVocabulary(tokens, words=r"(?s)\d|\D+")).report
    assert 0.9 <= report.cut_ratio < 1


def test_a_blank_before_the_first_word_shifts_no_other_piece() -> None:
    class Blank(TableVocabulary):
        def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return super().tokenize(" " + text, add_special=add_special, parse_special=parse_special)

    tokens = bytes_and(*WORDS)
    assert align(TableVocabulary(tokens), Blank(tokens)).report.cut_ratio > 0.98


_token = st.builds(
    Token,
    spelling=st.sampled_from([b"a", b"b", b"<c>", b"<d>", b"ee"]),
    control=st.booleans(),
    end=st.booleans(),
    piece=st.sampled_from([None, b"x"]),
)
_table = st.lists(_token, max_size=12)


@given(_table, _table, st.sampled_from(["table", "other"]))
def test_a_mapped_token_is_the_same_on_both_sides(ours: list[Token], theirs: list[Token], kind: str) -> None:
    # The 256 bytes come first, so that every sample text can be cut.
    target, draft = (
        TableVocabulary(bytes_and() + ours, kind=kind),
        TableVocabulary(bytes_and() + theirs, kind="other"),
    )
    alignment = compare(target, draft)
    _check_maps(alignment)
    for source, goal in enumerate(alignment.to_target.tolist()):
        if goal >= 0:
            assert target.spelling(goal) == draft.spelling(source)
            assert target.is_control(goal) == draft.is_control(source)
            if kind != draft.kind or draft.is_control(source) or draft.spelling(source).startswith(b"<"):
                assert target.piece(goal) == draft.piece(source)
                assert target.ends_generation(goal) == draft.ends_generation(source)


def _check_maps(alignment: Alignment) -> None:
    pairs = {(d, t) for d, t in enumerate(alignment.to_target.tolist()) if t >= 0}
    assert pairs == {(d, t) for t, d in enumerate(alignment.to_draft.tolist()) if d >= 0}
    assert len(pairs) == alignment.report.common_tokens
    assert alignment.identical == (
        alignment.to_target.tolist() == list(range(len(alignment.to_draft))) == alignment.to_draft.tolist()
    )


def test_a_control_token_is_not_the_text_of_the_same_spelling() -> None:
    text = bytes_and(*WORDS)
    target = TableVocabulary([*text, Token(b"<tool>", control=True)])
    draft = TableVocabulary([*text, Token(b"<tool>")])
    assert align(target, draft).to_target[len(text)] == -1
