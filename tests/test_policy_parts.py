"""The automatic policy, part by part: the value of drafting and of going on, shared calls, costs, offers."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constrained import OneOf, Pieces
from engines import sampler
from outrider.core.contracts import Drafters, DraftProgress, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, StepRecord
from outrider.policy.auto import AutoPolicy
from outrider.policy.objective import (
    StepCosts,
    allocate,
    asking_value,
    continuation_values,
    expected_rewards,
    stopping_value,
)
from outrider.policy.state import PolicyState, average_after
from recordings import FLAT, SMALL, curve
from simulated import Offering, Simulated


def test_a_token_is_accepted_only_if_all_before_it_are() -> None:
    costs = StepCosts(2.0, np.ones(3))
    assert expected_rewards([0.5, 0.5], costs) == [2 * 1, 2 * (1 + 0.5), 2 * (1 + 0.5 + 0.25)]


def test_one_token_moves_the_average_confidence_by_less_than_half_of_the_way() -> None:
    assert 0.5 < average_after(0.5, 1.0) < 0.75


def test_what_a_draft_model_has_not_read_is_part_of_its_first_call() -> None:
    draft = curve(SMALL, 0.02)
    state = PolicyState(curve(FLAT), draft)
    text = state.new_request(0, None)
    text.draft = DraftProgress(8, 8)
    found = state.with_model(StepCosts(0.1, np.ones(9)), text, 0, 8)
    assert found.first_draft_s[0] == pytest.approx(draft.call_s(8, context=0))
    assert found.draft_step_s == pytest.approx(draft.call_s(1, context=0))


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.floats(0.2, 2.0), st.integers(0, 3))
def test_the_value_of_a_draft_counts_what_a_rejection_has_evaluated_again(
    acceptance: list[float], reward_s: float, before: int
) -> None:
    """Against all outcomes, one by one."""
    calls_s = np.array([1.0, 1.3, 1.7, 1.6, 2.2, 2.9, 3.1])
    reread_s = calls_s - 1.0 + 0.1 * before
    values = []
    for n in range(len(acceptance) + 1):
        value, reached = 0.0, 1.0
        for accepted, p in enumerate(acceptance[:n]):
            value += reached * (1 - p) * (reward_s * (accepted + 1) - reread_s[accepted + 1])
            reached *= p
        values.append(value + reached * reward_s * (n + 1) - calls_s[n])
    costs = StepCosts(reward_s, calls_s, recompute_s=reread_s)
    assert stopping_value(acceptance, costs) == pytest.approx(max(values))
    twice = allocate([(acceptance, 0), ([], 0)], costs)[0]
    assert values[twice] == pytest.approx(max(values))


@given(st.floats(0.05, 0.98), st.floats(0.05, 1.0), st.integers(0, 3))
def test_going_on_is_worth_the_best_number_of_further_tokens(
    average: float, prefix_prob: float, n: int
) -> None:
    calls_s = np.array([1.0, 1.2, 2.6, 2.2, 2.3, 4.0, 4.1])
    costs = StepCosts(0.8, calls_s, draft_step_s=0.2)
    values = []
    for k in range(1, 6 - n):
        earned = sum(prefix_prob * average**i for i in range(1, k + 1))
        values.append(0.8 * earned - calls_s[n + k] - 0.2 * k)
    assert continuation_values(n, average, prefix_prob, costs, 5) == pytest.approx([max(values)])
    assert continuation_values(0, average, prefix_prob, costs, 5, n)[n] == pytest.approx(max(values))


def test_a_block_is_paid_for_once() -> None:
    """With one call for four tokens the second token comes free; no token is drafted after them."""
    calls_s = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    one, four = StepCosts(0.8, calls_s, draft_step_s=0.2), StepCosts(0.8, calls_s, draft_step_s=0.2, block=4)
    assert asking_value(0, 0.5, 1.0, one, 1) == asking_value(0, 0.5, 1.0, four, 1)
    assert asking_value(0, 0.9, 1.0, four, 4) == pytest.approx(asking_value(0, 0.9, 1.0, one, 4) + 3 * 0.2)
    assert (one.longest(16), four.longest(16), four.longest(2)) == (5, 4, 2)
    assert four.limited(1.45).max_length == 4 and one.limited(1.45).max_length == 2


# The tokens of one call go to the drafts where they are most likely to be accepted.

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
    for reward_s, last, expected in ((1.0, 1.3, [6, 5]), (0.3, 4.0, [3, 0]), (0.3, 20.0, [0, 0])):
        assert allocate([sure, doubtful], StepCosts(reward_s, np.linspace(1, last, 13))) == expected


# Offers


def test_offers_after_a_wrong_token_teach_nothing() -> None:
    """Another drafter's tokens were accepted, with which the rest of the offer agrees by chance."""
    learned = []
    draft = Draft(tuple(DraftToken(token, "other", 0.9) for token in (2, 1, 1)))
    tokens, none = (*draft.tokens, 0), DraftWork()
    record = StepRecord(0, 0, "decode", 5, 4, draft, 3, tokens, none, 0.0, 0.1, 0.0, 0.0, 0.1, batch_tokens=4)
    for length in (1, 6):
        policy = Simulated(FLAT)
        policy.begin(0, 5, None)
        policy.propose(Drafters.of([Offering(length)]), [DraftRequest(0, 20, sampler())])
        policy.observe({0: record})
        learned.append(policy.state.estimator("lookup").weights)
    assert learned[0] == learned[1]


def test_what_a_constraint_bars_is_not_drafted() -> None:
    words = Pieces("a", "b", "c")
    constraint = OneOf(words, ["aabca", "aacba"], forcing=False)
    request = DraftRequest(0, 20, sampler(), constraint=constraint)
    [draft], _ = AutoPolicy(curve(FLAT)).propose(Drafters.of([Offering()]), [request])
    assert draft.tokens == (), "the offer is of tokens 1, and the text begins with token 0"
