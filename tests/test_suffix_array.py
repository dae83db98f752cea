"""The sorted contexts and what is looked up in them, against a search by brute force."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookups import longest_match
from outrider.drafters import lookup, suffix_array
from outrider.drafters.lookup import ALONG, Match
from outrider.drafters.suffix_array import DEPTH, ContextIndex


@pytest.fixture(autouse=True)
def all_places(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No sampling, but where a test is about it."""
    if "sample" not in request.node.name:
        monkeypatch.setattr(suffix_array, "SAMPLE", 10_000)
        monkeypatch.setattr(lookup, "ALONG", 10_000)


words = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=50))
texts = st.lists(words, max_size=5)
recent_tokens = st.lists(st.integers(0, 4), max_size=12)


def followed(part: Sequence[int], corpus: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Number of the text and place of every token that follows `part`, the oldest first."""
    size = len(part)
    return [
        (number, end)
        for number, text in enumerate(corpus)
        for end in range(size, len(text))
        if list(text[end - size : end]) == list(part)
    ]


def longest_followed(recent: Sequence[int], corpus: Sequence[Sequence[int]]) -> int:
    """The length of the longest suffix of `recent` that something follows in a text of the corpus."""
    return max((longest_match(recent, text[:-1], DEPTH) for text in corpus), default=0)


def expected(recent: Sequence[int], corpus: Sequence[Sequence[int]], length: int) -> Match | None:
    """What a reader finds after the last `length` tokens."""
    found = followed(recent[len(recent) - length :], corpus)
    if not length or not found:
        return None
    followers = [corpus[number][end] for number, end in found]
    counts = Counter(followers)
    token = next(t for t in reversed(followers) if counts[t] == max(counts.values()))
    return Match(token, length, counts[token], len(found))


@given(texts, recent_tokens)
def test_the_longest_match_is_found_and_all_that_followed_it(
    corpus: list[list[int]], recent: list[int]
) -> None:
    match = ContextIndex.build(corpus).reader(recent, 1).find()
    assert match == expected(recent, corpus, longest_followed(recent, corpus))


@given(texts, recent_tokens, st.lists(st.integers(0, 4), max_size=8))
def test_reading_on_equals_starting_there(
    corpus: list[list[int]], recent: list[int], after: list[int]
) -> None:
    index = ContextIndex.build(corpus)
    reader = index.reader(recent, 1)
    for end, token in enumerate(after, start=1):
        reader.find()
        reader.read(token)
        assert reader.find() == index.reader([*recent, *after[:end]], 1).find()


@given(texts, st.data())
def test_a_match_never_crosses_the_border_of_two_texts(corpus: list[list[int]], data: st.DataObject) -> None:
    joined = [token for text in corpus for token in text]
    start = data.draw(st.integers(0, len(joined)))
    end = data.draw(st.integers(start, min(len(joined), start + 10)))
    places, length = ContextIndex.build(corpus).search(joined[start:end])
    assert length == longest_followed(joined[start:end], corpus)
    assert len(places) == len(followed(joined[end - length : end], corpus)) * (length > 0)


def test_matches_go_as_deep_as_places_are_sorted() -> None:
    text = list(range(100))
    corpus = [[9, *text[50:60], 7], text]
    index = ContextIndex.build(corpus)
    for size in range(1, 2 * DEPTH):
        _, length = index.search(text[60 - size if size < 60 else 0 : 60])
        assert length == min(size, DEPTH)
    assert index.reader(text[40:60], 1).find() == Match(60, 20, 1, 1)


def test_long_texts_that_repeat_are_sorted_by_all_the_depth() -> None:
    rng = np.random.default_rng(3)
    phrase = rng.integers(0, 3, 40).tolist()
    corpus = [[*rng.integers(0, 3, 3).tolist(), *phrase, 7] for _ in range(30)] + [phrase * 3]
    index = ContextIndex.build(corpus)
    for end in range(1, len(phrase)):
        recent = [2, 0, 1, *phrase[:end]]
        assert index.search(recent)[1] == longest_followed(recent, corpus)


def test_of_many_places_a_sample_is_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_array, "SAMPLE", 4)
    # Sorted by what comes before: half of the places, after 0, go on with 8, the others with 9.
    corpus = [[0, 1, 8]] * 50 + [[2, 1, 9]] * 50
    places, length = ContextIndex.build(corpus).search([5, 1])
    assert (len(places), length) == (4, 1)
    index = ContextIndex.build(corpus)
    followers = [index.follower(place) for place in places]
    assert sorted(followers) == [8, 8, 9, 9]


def test_a_draft_goes_along_a_sample_of_the_latest_places() -> None:
    reader = ContextIndex.build([[1, 2, 3, 5]] * ALONG + [[1, 2, 3, 4]] * ALONG).reader([1], 1)
    totals = []
    for token in (2, 3, 4):
        match = reader.find()
        assert match is not None and match.token == token
        totals.append(match.total)
        reader.read(token)
    assert totals == [2 * ALONG, ALONG, ALONG]


def test_short_matches_are_not_used() -> None:
    index = ContextIndex.build([[1, 2, 3]])
    assert index.reader([1, 2], 2).find() == Match(3, 2, 1, 1)
    assert index.reader([5, 2], 2).find() is None
    assert index.reader([1, 2], 3).find() is None


def test_largest_token_ids_are_kept() -> None:
    large = 2**31 - 2
    assert ContextIndex.build([[large, 0, large]]).reader([large, 0], 1).find() == Match(large, 2, 1, 1)
