"""The tokens of one call go to the drafts where they are most likely to stand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.policy.allocation import Allocatable, allocate

CHANCES = st.lists(st.floats(0.01, 1.0), max_size=4)
CHAINS = st.lists(
    st.builds(
        lambda chances, fixed: Allocatable(chances, min(fixed, len(chances))), CHANCES, st.integers(0, 2)
    ),
    min_size=2,  # one that has the call to itself looks further ahead: test_policy_auto
    max_size=3,
)


def gain(chains: list[Allocatable], lengths: tuple[int, ...], calls_s: list[float], token_s: float) -> float:
    expected = sum(np.cumprod(c.acceptance)[:n].sum() for c, n in zip(chains, lengths, strict=True))
    fixed = sum(chain.num_fixed for chain in chains)
    extra_s = calls_s[sum(lengths)] - calls_s[fixed]
    return float(expected * token_s - extra_s)


@given(CHAINS, st.lists(st.floats(0.1, 3.0), min_size=13, max_size=13), st.floats(0.1, 2.0))
def test_no_other_shares_are_worth_more(
    chains: list[Allocatable], calls_s: list[float], token_s: float
) -> None:
    lengths = tuple(allocate(chains, np.array(calls_s), token_s))
    all_lengths = product(*(range(chain.num_fixed, len(chain.acceptance) + 1) for chain in chains))
    best = max(gain(chains, each, calls_s, token_s) for each in all_lengths)
    assert gain(chains, lengths, calls_s, token_s) == pytest.approx(best, abs=1e-9)
    assert all(n >= chain.num_fixed for n, chain in zip(lengths, chains, strict=True))


def test_as_the_call_fills_the_doubtful_drafts_go_first() -> None:
    sure, doubtful = Allocatable([0.95] * 6), Allocatable([0.5] * 6)
    cheap = np.linspace(1, 1.3, 13)
    expensive = np.linspace(1, 4, 13)
    assert allocate([sure, doubtful], cheap, 1.0) == [6, 5]
    assert allocate([sure, doubtful], expensive, 0.3) == [3, 0]
    assert allocate([sure, doubtful], np.linspace(1, 20, 13), 0.3) == [0, 0]
