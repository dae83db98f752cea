"""How much two sequences of tokens have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.sequences import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS)
def test_a_common_prefix_is_the_longest_beginning_of_both(one: list[int], other: list[int]) -> None:
    shared = common_prefix(one, other)
    assert one[:shared] == other[:shared]
    assert one[: shared + 1] != other[: shared + 1] or shared == len(one) == len(other)


@given(TOKENS, TOKENS, TOKENS)
def test_it_is_that_of_tuples_and_iterators_too(start: list[int], one: list[int], other: list[int]) -> None:
    assert common_prefix(tuple(start + one), iter(start + other)) == len(start) + common_prefix(one, other)
