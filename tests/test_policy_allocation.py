"""The tokens of one call go to the drafts where they are most likely to be accepted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.objective import StepCosts, allocate

Candidate = tuple[list[float], int]
"""the acceptance of its tokens, and how many of them are drafted in any case"""

ACCEPTANCE = st.lists(st.floats(0.01, 1.0), max_size=4)
CANDIDATES = st.lists(
    st.builds(lambda found, fixed: (found, min(fixed, len(found))), ACCEPTANCE, st.integers(0, 2)),
    min_size=2,  # one that has the call to itself looks further ahead: test_policy_auto
    max_size=3,
)


def gain(
    candidates: list[Candidate], lengths: tuple[int, ...], calls_s: list[float], reward_s: float
) -> float:
    expected = sum(np.cumprod(found)[:n].sum() for (found, _), n in zip(candidates, lengths, strict=True))
    extra_s = calls_s[sum(lengths)] - calls_s[sum(fixed for _, fixed in candidates)]
    return float(expected * reward_s - extra_s)


@given(CANDIDATES, st.lists(st.floats(0.1, 3.0), min_size=13, max_size=13), st.floats(0.1, 2.0))
def test_no_other_shares_gain_more(
    candidates: list[Candidate], calls_s: list[float], reward_s: float
) -> None:
    lengths = tuple(allocate(candidates, StepCosts(reward_s, np.array(calls_s))))
    all_lengths = product(*(range(fixed, len(found) + 1) for found, fixed in candidates))
    best = max(gain(candidates, each, calls_s, reward_s) for each in all_lengths)
    assert gain(candidates, lengths, calls_s, reward_s) == pytest.approx(best, abs=1e-9)
    assert all(n >= fixed for n, (_, fixed) in zip(lengths, candidates, strict=True))


def test_as_the_call_fills_the_doubtful_drafts_go_first() -> None:
    sure, doubtful = ([0.95] * 6, 0), ([0.5] * 6, 0)
    cheap = np.linspace(1, 1.3, 13)
    expensive = np.linspace(1, 4, 13)
    assert allocate([sure, doubtful], StepCosts(1.0, cheap)) == [6, 5]
    assert allocate([sure, doubtful], StepCosts(0.3, expensive)) == [3, 0]
    assert allocate([sure, doubtful], StepCosts(0.3, np.linspace(1, 20, 13))) == [0, 0]
