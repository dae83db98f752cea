"""What a curve means for drafts, against plain enumeration."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.costs.expected_speed import StepCosts, best_call, expected_tokens

CURVES = st.lists(st.floats(0.5, 8.0), min_size=9, max_size=9).map(lambda rest: [1.0, *rest])


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("num_drafted", [0, 1, 3, 5])
def test_expected_tokens_by_enumeration(acceptance: float, num_drafted: int) -> None:
    expected = 0.0
    for right in product((True, False), repeat=num_drafted):
        probability = 1.0
        for one in right:
            probability *= acceptance if one else 1 - acceptance
        accepted = right.index(False) if False in right else num_drafted
        expected += probability * (accepted + 1)
    assert expected_tokens(num_drafted, acceptance) == pytest.approx(expected)


@given(CURVES, st.integers(1, 9), st.floats(0, 3), st.none() | st.floats(0, 3))
def test_at_break_even_a_draft_is_as_fast_as_plain_decoding(
    calls_s: list[float], num_drafted: int, draft_s: float, first_s: float | None
) -> None:
    costs = StepCosts(calls_s, draft_s, first_s)
    found = costs.break_even(num_drafted)
    needed = calls_s[num_drafted] + (draft_s if first_s is None else first_s) + (num_drafted - 1) * draft_s
    if found is None:
        assert needed > num_drafted + 1
    elif found == 0:
        assert needed <= 1
    else:
        assert expected_tokens(num_drafted, found) == pytest.approx(needed)
        assert costs.speedup(num_drafted, found) == pytest.approx(1)


@given(CURVES, st.floats(0, 1))
def test_the_best_call_is_the_best_of_all(calls_s: list[float], acceptance: float) -> None:
    best = best_call(calls_s, acceptance)
    every = [calls_s[n - 1] / expected_tokens(n - 1, acceptance) for n in range(1, 11)]
    assert every[best - 1] == pytest.approx(min(every))
    assert StepCosts(calls_s).best_speedup(acceptance) == pytest.approx(calls_s[0] / min(every[1:]))
