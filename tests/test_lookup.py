"""Looking up, against a search by brute force: in the text itself, in sorted texts, in earlier ones of a
session, and in a predicted answer."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import asked
from outrider.backends.fake import FakeModel, FakeVocabulary, random_logits
from outrider.cli.report import SOURCE_STYLES, source_name
from outrider.core.contracts import Lookup
from outrider.core.data import Draft
from outrider.core.notices import collect_notices
from outrider.core.sequences import common_prefix
from outrider.drafters import earlier, lookup, prediction
from outrider.drafters.earlier import BLOCK_TOKENS, EarlierDrafter, Memory
from outrider.drafters.lookup import (
    ALONG,
    DEPTH,
    ContextIndex,
    IndexReader,
    Match,
    RunningText,
    SuffixDrafter,
    TextIndex,
)
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.registry import DRAFTERS, build_drafters
from outrider.models.vocab import align


def propose(drafter: Lookup, *, sequence: int = 0, max_tokens: int = 8, prefix: Sequence[int] = ()) -> Draft:
    """The first tokens that it offers; checks what they say of themselves."""
    draft = Draft(tuple(islice(drafter.propose(sequence, prefix), max_tokens)))
    assert draft.probs is None
    assert all(0 < acceptance < 1 for acceptance in draft.acceptance)
    assert all(len(token.evidence) == 3 for token in draft.items)
    assert draft.sources == (drafter.name,) * len(draft)
    return draft


def ends_of(part: Sequence[int], text: Sequence[int]) -> list[int]:
    """The places in `text` where `part` ends, ascending."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def longest_match(context: Sequence[int], text: Sequence[int], at_most: int = 1000) -> int:
    """The length of the longest suffix of `context` that occurs in `text`."""
    lengths = range(min(len(context), len(text), at_most), 0, -1)
    return next((size for size in lengths if ends_of(context[-size:], text)), 0)


# In the text itself

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


# In sorted texts


@contextmanager
def all_places() -> Iterator[None]:
    """No sampling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "SAMPLE", 10_000)
        patch.setattr(lookup, "ALONG", 10_000)
        yield


def reader(index: ContextIndex, recent: Sequence[int], min_match: int = 1) -> IndexReader:
    return IndexReader([index], recent, min_match, DEPTH)


words = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=50))
corpora = st.lists(words, max_size=5)
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


@given(corpora, recent_tokens)
@all_places()
def test_the_longest_match_is_found_and_all_that_followed_it(
    corpus: list[list[int]], recent: list[int]
) -> None:
    match = reader(ContextIndex.build(corpus), recent).find()
    assert match == expected(recent, corpus, longest_followed(recent, corpus))


@given(corpora, recent_tokens, st.lists(st.integers(0, 4), max_size=8))
@all_places()
def test_reading_on_equals_starting_there(
    corpus: list[list[int]], recent: list[int], after: list[int]
) -> None:
    index = ContextIndex.build(corpus)
    going = reader(index, recent)
    for end, token in enumerate(after, start=1):
        going.find()
        going.read(token)
        assert going.find() == reader(index, [*recent, *after[:end]]).find()


@given(corpora, st.data())
@all_places()
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
    assert reader(index, text[40:60]).find() == Match(60, 20, 1, 1)


def test_long_texts_that_repeat_are_sorted_by_all_the_depth() -> None:
    rng = np.random.default_rng(3)
    phrase = rng.integers(0, 3, 40).tolist()
    corpus = [[*rng.integers(0, 3, 3).tolist(), *phrase, 7] for _ in range(30)] + [phrase * 3]
    index = ContextIndex.build(corpus)
    for end in range(1, len(phrase)):
        recent = [2, 0, 1, *phrase[:end]]
        assert index.search(recent)[1] == longest_followed(recent, corpus)


def test_of_many_places_a_sample_is_spread_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "SAMPLE", 4)
    # Sorted by what comes before: half of the places, after 0, go on with 8, the others with 9.
    corpus = [[0, 1, 8]] * 50 + [[2, 1, 9]] * 50
    places, length = ContextIndex.build(corpus).search([5, 1])
    assert (len(places), length) == (4, 1)
    index = ContextIndex.build(corpus)
    followers = [index.follower(place) for place in places]
    assert sorted(followers) == [8, 8, 9, 9]


def test_a_draft_goes_along_a_sample_of_the_latest_places() -> None:
    going = reader(ContextIndex.build([[1, 2, 3, 5]] * ALONG + [[1, 2, 3, 4]] * ALONG), [1])
    totals = []
    for token in (2, 3, 4):
        match = going.find()
        assert match is not None and match.token == token
        totals.append(match.total)
        going.read(token)
    assert totals == [2 * ALONG, ALONG, ALONG]


def test_short_matches_are_not_used() -> None:
    index = ContextIndex.build([[1, 2, 3]])
    assert reader(index, [1, 2], 2).find() == Match(3, 2, 1, 1)
    assert reader(index, [5, 2], 2).find() is None
    assert reader(index, [1, 2], 3).find() is None


def test_largest_token_ids_are_kept() -> None:
    large = 2**31 - 2
    assert reader(ContextIndex.build([[large, 0, large]]), [large, 0]).find() == Match(large, 2, 1, 1)


# In earlier texts of a session


def say(drafter: EarlierDrafter, prompt: Sequence[int], answer: Sequence[int] = ()) -> None:
    """A whole request."""
    drafter.begin(0, asked(prompt))
    drafter.observe(0, answer)
    drafter.end(0)


def ask(drafter: EarlierDrafter, recent: Sequence[int], sequence: int = 0) -> Draft:
    """What would be drafted after these tokens."""
    drafter.begin(sequence, asked(recent))
    return propose(drafter, sequence=sequence)


def test_earlier_prompts_and_answers_are_looked_up() -> None:
    drafter = EarlierDrafter()
    say(drafter, [1, 2, 3], [4, 5])
    assert ask(drafter, [9, 1, 2]).tokens == (3, 4, 5)
    drafter.observe(0, [4])
    assert ask(drafter, [9, 3, 4]).tokens == (5,)
    assert ask(EarlierDrafter(), [1, 2, 3, 1, 2]) == Draft(), "a running text is not its own past"


def test_the_longest_match_counts_wherever_it_stands() -> None:
    drafter = EarlierDrafter(Memory(max_tokens=80))
    say(drafter, [1, 2, 3, 4])
    for i in range(4):
        say(drafter, [50 + 3 * i, 51 + 3 * i, 52 + 3 * i])  # the first is among the old ones now
    say(drafter, [7, 3, 8])
    assert ask(drafter, [1, 2, 3]).tokens == (4,)
    assert ask(drafter, [0, 7, 3]).tokens == (8,)


@given(corpora, st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_a_memory_with_room_equals_one_index_of_all_texts(spoken: list[list[int]], recent: list[int]) -> None:
    memory = Memory(max_tokens=2000)
    for text in spoken:
        memory.add(text)
    drafter = EarlierDrafter(memory)
    found = RunningText(recent, lambda: [ContextIndex.build(spoken)]).reader().find()
    draft = ask(drafter, recent)
    assert draft.tokens[:1] == (() if found is None else (found.token,))
    assert [token.evidence for token in draft.items[:1]] == (
        [] if found is None else [(found.length, found.right, found.total)]
    )


@given(st.lists(st.lists(st.integers(0, 500), max_size=60), max_size=40))
def test_a_memory_never_holds_more_than_it_may(spoken: list[list[int]]) -> None:
    memory = Memory(max_tokens=100)
    for text in spoken:
        memory.add(text)
        assert memory.num_tokens <= 100


def test_the_oldest_texts_are_dropped_first_and_of_a_long_one_the_beginning() -> None:
    memory = Memory(max_tokens=100)
    for i in range(40):
        memory.add([3 * i, 3 * i + 1, 3 * i + 2])
    drafter = EarlierDrafter(memory)
    known = [i for i in range(40) if len(ask(drafter, [3 * i, 3 * i + 1]))]
    assert known == list(range(known[0], 40))
    assert 20 <= len(known) <= 33
    memory.add(range(1000))
    assert ask(drafter, [997, 998]).tokens == (999,)
    assert ask(drafter, [1, 2]) == Draft() and memory.num_tokens <= 100


def test_the_turns_of_a_conversation_are_stored_once() -> None:
    memory = Memory()
    text: list[int] = []
    for turn in range(20):
        text += range(1000 * turn, 1000 * turn + 300)
        memory.add(list(text))
    assert memory.num_tokens < 1.5 * len(text)
    drafter = EarlierDrafter(memory)
    for turn in range(20):
        start = 1000 * turn
        for place in range(start + 2, start + 290, 17):
            assert ask(drafter, [place - 2, place - 1]).tokens[:2] == (place, place + 1)
    # across the seam of two turns
    assert ask(drafter, [298, 299]).tokens[:2] == (1000, 1001)


def test_what_follows_a_shared_beginning_is_kept() -> None:
    memory, system = Memory(), list(range(10 * BLOCK_TOKENS))
    for user in range(50):
        memory.add([*system, 5000 + 2 * user, 5001 + 2 * user])
    assert memory.num_tokens < 4 * len(system)
    drafter = EarlierDrafter(memory)
    for user in range(50):
        assert ask(drafter, [len(system) - 2, len(system) - 1, 5000 + 2 * user]).tokens == (5001 + 2 * user,)


def test_a_dropped_beginning_is_stored_again() -> None:
    memory = Memory(max_tokens=800)
    shared = list(range(2 * BLOCK_TOKENS))
    memory.add(shared)
    memory.add(range(10_000, 12_000))
    assert ask(EarlierDrafter(memory), [1, 2]) == Draft()
    memory.add([*shared, 7])
    assert ask(EarlierDrafter(memory), [1, 2]).tokens[:2] == (3, 4)


def test_nothing_is_found_across_scopes() -> None:
    drafter = EarlierDrafter()
    drafter.begin(0, asked([1, 2, 3], scope="yours"))
    drafter.end(0)
    assert ask(drafter, [1, 2]) == Draft()
    drafter.begin(1, asked([1, 2], scope="yours"))
    assert propose(drafter, sequence=1).tokens == (3,)


def test_of_many_scopes_the_one_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "_MAX_SCOPES", 2)
    drafter = EarlierDrafter()
    for sequence, scope in enumerate(["one", "two", "one", "three"]):
        drafter.begin(sequence, asked([1, 2, 3], scope=scope))
        drafter.end(sequence)
    found = {}
    for scope in ("one", "three", "two"):
        drafter.begin(7, asked([1, 2], scope=scope))
        found[scope] = propose(drafter, sequence=7).tokens
        drafter.end(7)
    assert found == {"one": (3,), "three": (3,), "two": ()}


def test_several_sequences_are_answered_in_their_order() -> None:
    drafter = EarlierDrafter()
    say(drafter, [1, 2, 3, 7, 8, 9])
    drafter.begin(3, asked([1, 2]))
    drafter.begin(5, asked([7, 8]))
    assert [propose(drafter, sequence=s).tokens[:1] for s in (5, 3)] == [(9,), (3,)]


def test_texts_that_end_meanwhile_are_found_at_once() -> None:
    drafter = EarlierDrafter()
    drafter.begin(1, asked([1, 2]))
    assert propose(drafter, sequence=1) == Draft()
    say(drafter, [1, 2, 3])
    say(drafter, [4])  # too short to repeat
    assert propose(drafter, sequence=1).tokens == (3,)
    drafter.reset()
    assert ask(drafter, [1, 2]) == ask(drafter, [4]) == Draft()


def test_a_new_memory_begins_with_what_outlived_the_last_one_each_scope_with_its_own() -> None:
    kept = {"one": [[1, 2, 3, 4], [1, 2, 3, 4, 5]], "two": [[1, 2, 3, 6, 7]]}
    drafter = EarlierDrafter(recall=lambda scope: kept.get(scope, []))
    for scope, expected in (("two", (3, 6, 7)), ("one", (3, 4, 5)), ("three", ())):
        drafter.begin(0, asked([9, 1, 2], scope=scope))
        assert propose(drafter).tokens == expected
        drafter.end(0)


# In a predicted answer

PROMPT = (1, 2, 3)
ANSWER = tuple(range(100, 160))


def expecting(answer: Sequence[int] = ANSWER) -> PredictionDrafter:
    drafter = PredictionDrafter()
    drafter.begin(0, asked(PROMPT, prediction=tuple(answer)))
    return drafter


def share_offered(answer: Sequence[int], predicted: Sequence[int]) -> float:
    """The share of an answer's tokens that are offered, read one by one."""
    drafter, offered = expecting(predicted), 0
    for token in answer:
        offered += propose(drafter, max_tokens=1).tokens == (token,)
        drafter.observe(0, [token])
    return offered / len(answer)


def test_the_prediction_is_offered_before_anything_was_said() -> None:
    drafter = expecting()
    assert propose(drafter).tokens == ANSWER[:8]
    assert propose(drafter).items[0].acceptance > 0.75
    assert propose(drafter, max_tokens=1000).tokens == ANSWER
    assert share_offered(ANSWER, ANSWER) == 1
    drafter.observe(0, ANSWER)
    assert propose(drafter) == Draft()


def test_the_longer_it_was_right_the_surer_it_is() -> None:
    drafter = expecting()
    draft = propose(drafter)
    lengths = [token.evidence[0] for token in draft.items]
    assert lengths == sorted(set(lengths))
    assert all(token.evidence[1:] == (1, 1) for token in draft.items)
    drafter.observe(0, ANSWER[:20])
    assert propose(drafter).items[0].acceptance > draft.items[7].acceptance


@pytest.mark.parametrize(
    "before",
    [(7, 8, 9), (100,), (7, 8, 102, 9)],
    ids=["a fence in front", "the first token twice", "a token of it out of place"],
)
def test_something_in_front_is_survived(before: tuple[int, ...]) -> None:
    drafter = expecting()
    drafter.observe(0, [*before, *ANSWER[:4]])
    assert propose(drafter).tokens == ANSWER[4:12]
    drafter.observe(0, [*ANSWER[4:40], *ANSWER[20:24]])  # where the answer repeats a part it goes back
    assert propose(drafter).tokens == ANSWER[24:32]


@given(st.integers(0, 50), st.integers(0, 6), st.lists(st.integers(0, 99), max_size=6))
def test_it_finds_its_way_back_after_an_edit(at: int, cut: int, put: list[int]) -> None:
    edited = [*ANSWER[:at], *put, *ANSWER[at + cut :]]
    drafter = expecting()
    for end, token in enumerate(edited, start=1):
        drafter.observe(0, [token])
        after = end - at - len(put)
        if end <= at or after > 0:  # one token that agrees is enough where no token occurs twice
            assert propose(drafter, max_tokens=3).tokens[:1] == tuple(edited[end : end + 1]) or (
                end == at and (put or cut)
            )


def test_many_edits_cost_little_each() -> None:
    text = [100 + (7 * i) % 53 for i in range(400)]  # every token occurs several times
    edited = list(text)
    for place in range(390, 0, -40):
        edited[place : place + 2] = [5]
    assert share_offered(edited, text) > 0.9


def test_after_a_departure_little_agreement_is_little_trusted() -> None:
    drafter = expecting()
    drafter.observe(0, [*ANSWER[:30], 7, 8])
    assert propose(drafter) == Draft()
    drafter.observe(0, ANSWER[33:34])
    draft = propose(drafter)
    assert draft.tokens == ANSWER[34:42]
    assert draft.items[0].evidence == (1, 1, 1)
    assert draft.items[0].acceptance < 0.5 < draft.items[7].acceptance


def test_the_nearest_place_wins_and_longer_agreement_beats_it() -> None:
    # "1 2" is at three places, "9 1 2" at the farthest alone.
    predicted = [50, 51, 52, 53, 1, 2, 10, *range(60, 80), 1, 2, 11, *range(80, 90), 9, 1, 2, 12]
    drafter = expecting(predicted)
    drafter.observe(0, [50, 51, 52, 53, 40, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (10,)
    drafter = expecting(predicted)
    drafter.observe(0, [50, 51, 52, 53, 40, 9, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (12,)


def test_near_is_what_is_near_to_the_departure() -> None:
    # "1 2" is far before, and right after, the place where the answer departs.
    predicted = [1, 2, 10, *range(50, 90), 1, 2, 11, *range(90, 99)]
    drafter = expecting(predicted)
    drafter.observe(0, predicted[:43])
    assert propose(drafter, prefix=[7, 1, 2], max_tokens=1).tokens == (11,)
    drafter.observe(0, [7, 1, 2])
    assert propose(drafter, max_tokens=1).tokens == (11,)
    # In a draft, too, it is the answer's own departure that counts.
    drafter = expecting(predicted)
    drafter.observe(0, [*predicted[:43], 7])
    assert propose(drafter, prefix=[1, 2], max_tokens=1).tokens == (11,)


def test_a_prefix_is_read_and_forgotten() -> None:
    drafter = expecting()
    assert propose(drafter, prefix=ANSWER[:5]).tokens == ANSWER[5:13]
    assert propose(drafter, prefix=[7, *ANSWER[:4]], max_tokens=2).tokens == ANSWER[4:6]
    assert propose(drafter, prefix=[7]) == Draft()
    assert propose(drafter).tokens == ANSWER[:8]
    drafter.observe(0, ANSWER[:1])
    assert propose(drafter).tokens == ANSWER[1:9]


def test_a_common_token_does_not_make_it_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def count(*texts: Iterator[int]) -> int:
        compared.append(common_prefix(*texts))
        return compared[-1]

    monkeypatch.setattr(prediction, "common_prefix", count)
    drafter = expecting([3] * 10_000)
    drafter.observe(0, [4, 3])
    assert 0 < len(compared) <= 2 * prediction.MAX_PLACES


def test_only_the_request_that_expects_it_gets_it_and_it_ends_with_that() -> None:
    drafter = expecting()
    drafter.begin(1, asked(PROMPT))
    assert propose(drafter, sequence=1) == Draft()
    assert propose(drafter, sequence=2) == Draft()
    drafter.observe(1, [5])
    assert propose(drafter).tokens == ANSWER[:8]
    drafter.end(0)
    assert propose(drafter) == Draft()
    drafter.begin(0, asked(PROMPT, prediction=ANSWER))
    drafter.begin(0, asked(PROMPT))
    assert propose(drafter) == Draft()
    drafter.begin(0, asked(PROMPT, prediction=ANSWER))
    drafter.reset()
    assert propose(drafter) == Draft()


# What a session builds, and how people see each

WORDS = FakeVocabulary("ab ")


def test_settings_that_ask_for_all_get_each_drafter_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b a b")
    model = FakeModel(WORDS, random_logits(WORDS.size))
    drafters = build_drafters(model, corpus=[tmp_path], draft=(model, align(WORDS, WORDS)))
    assert [drafter.name for drafter in drafters] == [kind.name for kind in DRAFTERS]
    assert [drafter.is_free for drafter in drafters] == [kind.name != "draft" for kind in DRAFTERS]


def test_what_is_switched_off_or_impossible_is_not_built() -> None:
    model = FakeModel(WORDS, random_logits(WORDS.size))
    assert [drafter.name for drafter in build_drafters(model, lookup=False)] == ["prediction"]
    unable = FakeModel(WORDS, random_logits(WORDS.size), rewind="none")
    with collect_notices() as notices:
        drafters = build_drafters(unable, corpus=[Path("nowhere")])
    assert [drafter.name for drafter in drafters] == ["lookup", "earlier"]
    assert notices == ["the corpus is not used: fake cannot take rejected drafts back"]


def test_people_see_every_drafter_by_a_name_and_a_colour_of_its_own() -> None:
    styles = [SOURCE_STYLES[kind.name] for kind in DRAFTERS]
    assert len(set(styles)) == len(styles) and all(styles)
    assert all(source_name(kind.name) == kind.title for kind in DRAFTERS)
