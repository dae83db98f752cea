"""The lookup drafter, against a search of the text by brute force."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import asked
from lookups import ends_of, longest_match, propose
from outrider.core.data import Draft
from outrider.drafters.lookup import ALONG, Match, SuffixDrafter, TextIndex

# Few different tokens, so that texts repeat.
texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
# Evenly mixed ones, of which no run is found again more often than is looked at.
mixed_texts = st.builds(
    lambda rng, size: rng.choices(range(3), k=size),
    st.builds(random.Random, st.integers(0, 2**32 - 1)),
    st.integers(1, 40),
)


def drafter_over(tokens: Sequence[int], min_match: int = 1) -> SuffixDrafter:
    drafter = SuffixDrafter(min_match)
    drafter.begin(0, asked(tokens))
    return drafter


def longest_repeat(text: Sequence[int]) -> int:
    """The length of the longest suffix that also ends earlier."""
    lengths = range(len(text) - 1, 0, -1)
    return next((size for size in lengths if len(ends_of(text[-size:], text)) > 1), 0)


def continuations(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """The tokens that followed `part` in `text`, the oldest first."""
    return [text[end] for end in ends_of(part, text) if end < len(text)]


def favourite(followers: Sequence[int]) -> int:
    """The most frequent token, the latest on a tie."""
    counts = Counter(followers)
    most = max(counts.values())
    return next(token for token in reversed(followers) if counts[token] == most)


def draft_by_search(
    text: Sequence[int], prefix: Sequence[int], max_tokens: int, min_match: int
) -> list[tuple[int, tuple[float, ...]]]:
    """Tokens and evidence that the drafter promises, found without an index."""
    context = [*text, *prefix]
    match_length = longest_match(context, text) if prefix else longest_repeat(text)
    drafted: list[tuple[int, tuple[float, ...]]] = []
    at_most = len(text)
    while len(drafted) < max_tokens:
        followers: list[int] = []
        while match_length >= min_match and not followers:
            followers = continuations(context[-match_length:], text)[-at_most:]
            if not followers:
                match_length, at_most = match_length - 1, len(text)
        if not followers:
            break
        token = favourite(followers)
        drafted.append((token, (match_length, followers.count(token), len(followers))))
        context.append(token)
        match_length, at_most = match_length + 1, ALONG
    return drafted


@given(mixed_texts, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 3), st.integers(1, 10))
def test_draft_equals_that_of_a_search(
    text: list[int], prefix: list[int], min_match: int, max_tokens: int
) -> None:
    draft = propose(drafter_over(text, min_match), prefix=prefix, max_tokens=max_tokens)
    evidence = [token.evidence for token in draft.items]
    assert list(zip(draft.tokens, evidence, strict=True)) == draft_by_search(
        text, prefix, max_tokens, min_match
    )
    matches = [Match(token.token, *map(int, token.evidence)) for token in draft.items]
    assert list(draft.acceptance) == [match.acceptance for match in matches]


@given(mixed_texts, st.integers(1, 5))
def test_a_draft_goes_on_after_its_own_beginning(text: list[int], cut: int) -> None:
    whole = propose(drafter_over(text))
    rest = propose(drafter_over(text), prefix=whole.tokens[:cut])
    assert rest.tokens[: max(len(whole) - cut, 0)] == whole.tokens[cut:]


@given(texts, st.data())
def test_reading_in_pieces_equals_reading_at_once(text: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(text)))
    second = data.draw(st.integers(first, len(text)))
    drafter = SuffixDrafter(min_match=1)
    drafter.begin(0, asked(text[:first]))
    drafter.observe(0, text[first:second])
    drafter.end(0)
    drafter.begin(0, asked(tuple(text)))
    assert propose(drafter) == propose(drafter_over(text))


def test_next_turn_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_over([1, 2, 3])
    drafter.observe(0, [4])
    drafter.end(0)
    read: list[int] = []
    monkeypatch.setattr(TextIndex, "extend", lambda _, tokens: read.extend(tokens))
    drafter.begin(0, asked([1, 2, 3, 4, 5, 6]))
    assert read == [5, 6]


@given(texts, texts)
def test_another_prompt_starts_afresh(earlier: list[int], text: list[int]) -> None:
    drafter = drafter_over([9, *earlier])
    drafter.end(0)
    drafter.begin(0, asked(text))
    assert propose(drafter) == propose(drafter_over(text))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=60))
def test_sequences_do_not_mix(arrivals: list[tuple[int, int]]) -> None:
    together = drafter_over([9])
    for sequence in (1, 2):
        together.begin(sequence, asked([9]))
    for sequence, token in arrivals:
        together.observe(sequence, [token])
    for sequence in range(3):
        alone = SuffixDrafter(min_match=1)
        alone.begin(sequence, asked([9]))
        alone.observe(sequence, [token for other, token in arrivals if other == sequence])
        assert propose(together, sequence=sequence) == propose(alone, sequence=sequence)


def test_nothing_is_looked_up_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Sequence[int]] = []
    search = TextIndex.search

    def counted(self: TextIndex, text: Sequence[int], least: int) -> tuple[list[int], int]:
        searched.append(text)
        return search(self, text, least)

    monkeypatch.setattr(TextIndex, "search", counted)
    offers = drafter_over([1, 2, 3, 4, 5, 1]).propose(0, ())
    assert searched == []
    assert next(offers).token == 2
    assert len(searched) == 1


@given(st.lists(st.integers(0, 1), min_size=1, max_size=400))
def test_a_search_looks_at_a_few_places_only(text: list[int]) -> None:
    draft = propose(drafter_over(text), max_tokens=1)
    assert all(token.evidence[2] <= 33 for token in draft.items)


def test_proposing_changes_nothing_and_an_unknown_sequence_gets_nothing() -> None:
    drafter = drafter_over([1, 2, 3, 1, 2])
    before = propose(drafter)
    assert propose(drafter, prefix=[3, 7, 1]).tokens[0] == 2
    assert propose(drafter) == before and propose(drafter, sequence=2) == Draft()


def test_one_token_repeated_is_drafted_to_the_end() -> None:
    draft = propose(drafter_over([7] * 500), max_tokens=16)
    assert draft.tokens == (7,) * 16
    assert all(0 < chance < 1 for chance in draft.acceptance)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 50))
def test_estimate_rises_with_match_length_and_share(match_length: int, count: int, misses: int) -> None:
    def chance(length: int, right: int, total: int) -> float:
        return Match(1, length, right, total).acceptance

    total = count + misses
    found = chance(match_length, count, total)
    assert 0 < found < 1
    assert found < chance(match_length + 1, count, total)
    assert found < chance(match_length, count + 1, total + 1)
    assert found > chance(match_length, count, total + 1)
