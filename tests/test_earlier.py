"""Looking up in earlier texts of a session: what is remembered, what is not, and for whom."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import asked
from lookups import propose
from outrider.core.data import Draft
from outrider.drafters import earlier
from outrider.drafters.earlier import BLOCK_TOKENS, EarlierDrafter, Memory
from outrider.drafters.suffix_array import ContextIndex

texts = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8)


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


@given(texts, st.lists(st.integers(0, 4), min_size=1, max_size=10))
def test_a_memory_with_room_equals_one_index_of_all_texts(spoken: list[list[int]], recent: list[int]) -> None:
    memory = Memory(max_tokens=2000)
    for text in spoken:
        memory.add(text)
    drafter = EarlierDrafter(memory)
    found = ContextIndex.build(spoken).reader(recent).find()
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
