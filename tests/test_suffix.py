"""The lookup drafter, against a search of the text by brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import asked, sampler
from lookups import UpTo, ends_of, longest_match, propose
from outrider.core.contracts import DraftRequest
from outrider.core.data import Draft
from outrider.core.errors import SettingError
from outrider.drafters.lookup import EVIDENCE, estimate
from outrider.drafters.suffix import MAX_CHAIN, SuffixAutomaton, SuffixDrafter

# Few different tokens, so that texts repeat and states split.
texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
# Evenly mixed ones, whose matches do not nest deeper than counts are kept for.
mixed_texts = st.builds(
    lambda rng, size: rng.choices(range(3), k=size),
    st.builds(random.Random, st.integers(0, 2**32 - 1)),
    st.integers(1, 40),
)


def drafter_over(tokens: Sequence[int], min_match: int = 1) -> SuffixDrafter:
    drafter = SuffixDrafter(min_match)
    drafter.begin(0, asked(tokens))
    return drafter


def automaton_over(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.extend(token)
    return automaton


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
    """Tokens and evidence that the drafter promises, found without an automaton."""
    context = [*text, *prefix]
    match_length = longest_match(context, text) if prefix else longest_repeat(text)
    drafted: list[tuple[int, tuple[float, ...]]] = []
    while len(drafted) < max_tokens:
        followers: list[int] = []
        while match_length >= min_match and not followers:
            followers = continuations(context[-match_length:], text)
            match_length -= not followers
        if not followers:
            break
        token = favourite(followers)
        age = len(context) + 1 - ends_of([*context[-match_length:], token], text)[-1]
        drafted.append((token, (match_length, followers.count(token), len(followers), age)))
        context.append(token)
        match_length += 1
    return drafted


@given(texts)
def test_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend(token)
        assert automaton.match[1] == longest_repeat(text[:end])


@given(texts)
def test_automaton_stays_within_twice_the_text(text: list[int]) -> None:
    assert automaton_over(text).num_states <= 2 * len(text)


@given(mixed_texts)
def test_matches_are_continued_by_their_most_frequent_followers(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend(token)
        state, length = automaton.match
        while length:
            followers = continuations(text[end - length : end], text[:end])
            likely = automaton.most_likely(state)
            assert likely is not None
            assert likely.token == favourite(followers)
            assert (likely.count, likely.total) == (followers.count(likely.token), len(followers))
            last_end = ends_of([*text[end - length : end], likely.token], text[:end])[-1]
            assert likely.last_end == last_end
            state, length = automaton.shorter(state)


def test_counts_stay_within_their_totals_where_matches_nest_deeper_than_counted() -> None:
    # Every ending of the phrase is a match of its own, and short ones are not counted each time.
    phrase, after = list(range(2 * MAX_CHAIN)), 99
    nested = [[100 + size, *phrase[-size:], 500 + size] for size in range(1, len(phrase))]
    repeated = [[1000 + i, *phrase, after] for i in range(99)]
    automaton = automaton_over([*chain(*nested, *repeated), *phrase])
    state, length = automaton.match
    assert length == len(phrase)
    while length:
        likely = automaton.most_likely(state)
        assert likely is not None
        assert 1 <= likely.count <= likely.total
        state, length = automaton.shorter(state)


@given(mixed_texts, st.lists(st.integers(0, 3), max_size=12))
def test_reading_on_finds_the_longest_suffix_in_the_text(text: list[int], after: list[int]) -> None:
    automaton = automaton_over(text)
    num_states, (state, length) = automaton.num_states, automaton.match
    for read, token in enumerate(after, start=1):
        state, length = automaton.after(state, length, token)
        context = [*text, *after[:read]]
        assert length == longest_match(context, text)
        followers = continuations(context[len(context) - length :], text)
        likely = automaton.most_likely(state)
        assert (likely.token if likely else None) == (favourite(followers) if followers else None)
    assert automaton.num_states == num_states


@given(mixed_texts, st.lists(st.integers(0, 3), max_size=6), st.integers(1, 3), st.integers(1, 10))
def test_draft_equals_that_of_a_search(
    text: list[int], prefix: list[int], min_match: int, max_tokens: int
) -> None:
    draft = propose(drafter_over(text, min_match), prefix=prefix, max_tokens=max_tokens)
    evidence = tuple(estimate.evidence for estimate in draft.estimates)
    assert list(zip(draft.tokens, evidence, strict=True)) == draft_by_search(
        text, prefix, max_tokens, min_match
    )
    assert draft.acceptance == tuple(estimate(*map(int, numbers[:3])) for numbers in evidence)
    assert all(len(numbers) == len(EVIDENCE) for numbers in evidence)


@given(mixed_texts, st.integers(1, 5))
def test_a_draft_goes_on_after_its_own_beginning(text: list[int], cut: int) -> None:
    whole = propose(drafter_over(text))
    rest = propose(drafter_over(text), prefix=whole.tokens[:cut])
    assert rest.tokens[: max(len(whole) - cut, 0)] == whole.tokens[cut:]
    assert rest.estimates[: max(len(whole) - cut, 0)] == whole.estimates[cut:]


@given(texts)
def test_every_drafted_run_stands_in_the_text(text: list[int]) -> None:
    draft = propose(drafter_over(text), max_tokens=4)
    for i in range(len(draft)):
        last_two = [*text, *draft.tokens[: i + 1]][-2:]
        assert ends_of(last_two, text)


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
    monkeypatch.setattr(SuffixAutomaton, "extend", lambda _, token: read.append(token))
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
    together = SuffixDrafter(min_match=1)
    for sequence, token in arrivals:
        together.observe(sequence, [token])
    for sequence in range(3):
        alone = SuffixDrafter(min_match=1)
        alone.observe(sequence, [token for other, token in arrivals if other == sequence])
        assert propose(together, sequence=sequence) == propose(alone, sequence=sequence)


def test_several_wishes_are_answered_in_their_order() -> None:
    drafter = SuffixDrafter(min_match=1)
    drafter.begin(3, asked([1, 2, 1]))
    drafter.begin(5, asked([1, 7, 1]))
    requests = [DraftRequest(sequence, 1, sampler()) for sequence in (5, 4, 3)]
    drafts, _ = drafter.propose(requests, UpTo())
    assert [draft.tokens for draft in drafts] == [(7,), (), (2,)]


def test_longer_match_beats_more_frequent_shorter_one() -> None:
    # After 2 alone comes 9 twice; after "1 2" comes 3.
    assert propose(drafter_over([5, 2, 9, 6, 2, 9, 1, 2, 3, 1, 2])).tokens[0] == 3


def test_latest_continuation_wins_a_tie() -> None:
    assert propose(drafter_over([1, 5, 1, 6, 1])).tokens[0] == 6
    assert propose(drafter_over([1, 6, 1, 5, 1])).tokens[0] == 5
    assert propose(drafter_over([1, 5, 2, 1, 5, 3, 1, 6, 4, 1, 6, 8, 1])).tokens[0] == 6


def test_shorter_matches_carry_on_where_the_text_ends() -> None:
    # "7 7" is only at the end, where nothing has followed it; "7" has been followed by 7.
    assert propose(drafter_over([3, 7, 7]), max_tokens=4).tokens == (7, 7, 7, 7)
    assert propose(drafter_over([3, 7, 7], min_match=2)) == Draft()


def test_matches_below_the_minimum_are_not_used() -> None:
    text = [1, 2, 3, 4, 1, 2]
    assert propose(drafter_over(text, min_match=2), max_tokens=2).tokens == (3, 4)
    assert propose(drafter_over(text, min_match=3)) == Draft()


@pytest.mark.parametrize("prompt", [[4], [1, 2, 3, 4]])
def test_nothing_is_offered_where_nothing_repeats(prompt: list[int]) -> None:
    assert propose(drafter_over(prompt)) == Draft()


def test_unknown_sequence_gets_an_empty_draft() -> None:
    assert propose(SuffixDrafter(), sequence=2) == Draft()


def test_draft_ends_before_the_token_that_is_not_taken() -> None:
    drafter = drafter_over([1, 2, 3, 4, 5, 1])
    whole = propose(drafter, max_tokens=4)
    extend = UpTo(taken=2)
    draft = propose(drafter, max_tokens=4, stopping=extend)
    assert draft.tokens == whole.tokens[:2] == (2, 3)
    assert extend.estimates == list(whole.estimates[:3])
    assert extend.asked == [
        (question, drafted) for drafted in [(), (2,), (2, 3)] for question in ("wants", "takes")
    ]


def test_nothing_is_looked_up_that_is_not_wanted() -> None:
    drafter = drafter_over([1, 2, 3, 4, 5, 1])
    extend = UpTo(wanted=1)
    assert propose(drafter, max_tokens=4, stopping=extend).tokens == (2,)
    assert extend.asked == [("wants", ()), ("takes", ()), ("wants", (2,))]
    assert propose(drafter, stopping=UpTo(wanted=0)) == Draft()


def test_proposing_changes_nothing() -> None:
    drafter = drafter_over([1, 2, 3, 1, 2])
    before = propose(drafter)
    assert propose(drafter, prefix=[3, 7, 1]).tokens[0] == 2
    assert propose(drafter) == before


def test_lookup_is_free() -> None:
    assert SuffixDrafter().is_free


def test_one_token_repeated_is_drafted_to_the_end() -> None:
    draft = propose(drafter_over([7] * 500), max_tokens=16)
    assert draft.tokens == (7,) * 16
    assert all(0 < chance < 1 for chance in draft.acceptance)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 50))
def test_estimate_rises_with_match_length_and_share(match_length: int, count: int, misses: int) -> None:
    total = count + misses
    chance = estimate(match_length, count, total)
    assert 0 < chance < 1
    assert chance < estimate(match_length + 1, count, total)
    assert chance < estimate(match_length, count + 1, total + 1)
    assert chance > estimate(match_length, count, total + 1)


@pytest.mark.parametrize("min_match", [0, -3])
def test_minimum_below_one_is_refused(min_match: int) -> None:
    with pytest.raises(SettingError, match="lookup min match"):
        SuffixDrafter(min_match)
