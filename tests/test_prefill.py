"""How prompts share a call: by need, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.prefill import MAX_TOKENS, Pace, chunks

UNREAD = st.dictionaries(st.integers(0, 9), st.integers(1, 500), max_size=6)


@given(UNREAD, st.integers(-3, 300))
def test_no_room_is_lost_and_none_is_made_up(unread: dict[int, int], room: int) -> None:
    shares = chunks(unread, room)
    assert sum(shares.values()) == min(max(room, 0), sum(unread.values()))
    assert all(0 < size <= unread[key] for key, size in shares.items())


@given(UNREAD.filter(len), st.integers(2, 300))
def test_the_oldest_always_gets_on(unread: dict[int, int], room: int) -> None:
    oldest = next(iter(unread))
    assert chunks(unread, room)[oldest] >= min(unread[oldest], room // 2)


def test_the_short_one_is_not_held_up_by_a_long_one() -> None:
    assert chunks({0: 1000, 1: 40, 2: 100}, 128) == {0: 64, 1: 40, 2: 24}


def test_those_that_decode_are_not_held_up_long() -> None:
    pace = Pace(max_pause_s=0.25)
    assert pace.tokens(alone=True) == MAX_TOKENS
    assert 0 < pace.tokens(alone=False) < MAX_TOKENS
    for _ in range(20):
        pace.note(100, 1.0)
    assert pace.tokens(alone=False) == 25
    for _ in range(50):
        pace.note(100, 100.0)
    assert 1 < pace.tokens(alone=False) < 25
    for _ in range(50):
        pace.note(100, 0.001)
    assert pace.tokens(alone=False) == pace.tokens(alone=True) == MAX_TOKENS
