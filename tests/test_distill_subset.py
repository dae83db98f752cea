"""Which tokens a draft knows, and which prompts train it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import SettingError
from outrider.lab.prompts import HELD_OUT_SHARE, Prompt, conversation_hash, is_held_out
from outrider.models.vocab.subset import Subset, choose_subset, coverage
from vocabularies import TableVocabulary, Token

WORDS = ("the", "of", "and", "to", "in")
VOCABULARY = TableVocabulary(
    [Token(b"<s>", control=True), *(Token(bytes([i])) for i in range(97, 105)),
     *(Token(word.encode()) for word in WORDS), Token(b"bye", end=True)]
)  # fmt: skip
"""0: control; 1-8: bytes; 9-13: words; 14: ends a text"""
SIZE = VOCABULARY.size


def counts(**words: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found = np.zeros(SIZE, dtype=np.int64)
    for word, count in words.items():
        found[9 + WORDS.index(word)] = count
    return found


def test_the_most_frequent_tokens_are_kept_and_those_that_are_needed() -> None:
    subset = choose_subset(VOCABULARY, counts(of=3, to=9, the=1), 13)
    assert subset.to_target.tolist() == [*range(9), 10, 12, 14, -1] and subset.has_other
    assert subset.size == 13
    assert subset.to_draft[[0, 10, 12, 14]].tolist() == [0, 9, 10, 11]
    assert set(subset.to_draft[[9, 11, 13]].tolist()) == {12}


def test_a_size_that_is_no_reduction_keeps_all() -> None:
    for size in (SIZE, SIZE + 10):
        whole = choose_subset(VOCABULARY, counts(), size)
        assert not whole.has_other and whole.size == SIZE
        assert np.array_equal(whole.to_target, np.arange(SIZE)) and np.array_equal(
            whole.to_draft, whole.to_target
        )


def test_a_size_without_room_for_what_is_needed_is_refused() -> None:
    assert choose_subset(VOCABULARY, counts(), 12).size == 12
    with pytest.raises(SettingError, match="11 tokens are too few: 11 are needed in any case"):
        choose_subset(VOCABULARY, counts(), 11)


@given(st.sets(st.integers(0, 39), min_size=1))
def test_both_maps_say_the_same(kept: set[int]) -> None:
    subset = Subset.of(sorted(kept, reverse=True), 40)
    assert subset.to_target.tolist() == [*sorted(kept), -1]
    for token in range(40):
        place = int(subset.to_draft[token])
        assert (subset.to_target[place] == token) if token in kept else place == len(kept)


def test_coverage_is_the_share_of_known_tokens() -> None:
    subset = Subset.of([0, 1, 2], 10)
    texts = [np.array(text, dtype=np.int32) for text in ([0, 1, 5], [], [9])]
    assert coverage(subset, texts) == 0.5
    assert coverage(subset, []) == 1.0
    assert coverage(Subset.whole(10), texts) == 1.0


# Training or held out


def asked(text: str, **changes: object) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text})
    return replace(Prompt("a", messages), **changes)  # type: ignore[arg-type]


def test_about_the_share_is_held_out_and_always_the_same() -> None:
    prompts = [asked(f"What is {i} times {i % 7}?") for i in range(4000)]
    held_out = [is_held_out(prompt) for prompt in prompts]
    assert held_out == [is_held_out(prompt) for prompt in prompts]
    assert sum(held_out) / 4000 == pytest.approx(HELD_OUT_SHARE, abs=0.015)
    assert sum(is_held_out(prompt, 0.5) for prompt in prompts) / 4000 == pytest.approx(0.5, abs=0.04)
    assert not any(is_held_out(prompt, 0) for prompt in prompts)
    assert all(is_held_out(prompt, 1) for prompt in prompts)
    assert all(is_held_out(p, 0.5) for p, held in zip(prompts, held_out, strict=True) if held)


def test_the_side_of_a_conversation_does_not_change() -> None:
    """Held-out sets of earlier versions stay held out."""
    assert conversation_hash(Prompt("x", "Tell me  of\nLisbon")) == "b80bed9a48f0155349d9c3d6c9cffcf9"


def test_the_same_conversation_falls_on_the_same_side() -> None:
    plain = conversation_hash(asked("Tell me about Lisbon."))
    for text in ("  tell me about LISBON.\n", "Tell  me\tabout Lisbon."):
        assert conversation_hash(asked(text)) == plain
    assert (
        conversation_hash(asked("Tell me about Lisbon.", id="b", follow_ups=("And Porto?",), max_tokens=5))
        == plain
    )
    spread = (
        {"content": "Be brief.", "role": "system"},
        {"content": "Tell me about Lisbon.", "role": "user", "x": 1},
    )
    assert conversation_hash(Prompt("c", spread)) == plain
