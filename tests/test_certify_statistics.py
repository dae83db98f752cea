"""The statistics of the certificate: p-values that hold, power that is there, pooling, Holm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.certify.statistics import MIN_EXPECTED, pool, simulate_null
from outrider.lab.statistics import holm

PROBS = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


def test_p_values_are_uniform_under_the_null() -> None:
    rng = np.random.default_rng(1)
    null = simulate_null(PROBS, 400, 4000, rng)
    p = np.sort([null.p_value(null.statistic(rng.multinomial(400, PROBS))) for _ in range(2000)])
    distance = np.abs(p - (np.arange(2000) + 0.5) / 2000).max()
    assert distance < 0.05  # 1.63 / sqrt(2000) = 0.036 is Kolmogorov's 1 % bound, the null's noise on top


def test_p_values_never_reach_zero_and_count_the_sample_itself() -> None:
    null = simulate_null(PROBS, 400, 99, np.random.default_rng(2))
    assert null.p_value(np.inf) == pytest.approx(1 / 100)
    assert null.p_value(0.0) == 1.0
    assert null.p_value(float(null.statistics[-1])) == pytest.approx(2 / 100)


def test_the_stated_power_is_what_a_shift_meets() -> None:
    rng = np.random.default_rng(3)
    level = 0.001
    null = simulate_null(PROBS, 2000, 20_000, rng)
    shift = null.detectable_shift(level, rng)
    assert shift is not None and 0.03 < shift < 0.15
    shifted = PROBS.copy()  # halves: {0.4, 0.1} and the rest
    gains = np.array([True, False, False, True, False, False])
    shifted[gains] += shift * PROBS[gains] / PROBS[gains].sum()
    shifted[~gains] -= shift * PROBS[~gains] / PROBS[~gains].sum()
    draws = rng.multinomial(2000, shifted, size=500)
    found = np.mean([null.p_value(null.statistic(draw)) <= level for draw in draws])
    assert found > 0.9
    assert null.power(shift / 4, level, rng) < 0.5


def test_power_grows_with_samples_and_certainty_has_none() -> None:
    rng = np.random.default_rng(4)
    few, many = (simulate_null(PROBS, n, 5000, rng).power(0.05, 0.01, rng) for n in (200, 5000))
    assert few < 0.3 and many > 0.95
    certain = simulate_null(np.array([1.0]), 200, 1000, rng)
    assert certain.power(0.05, 0.01, rng) == 0.0 and certain.detectable_shift(0.01, rng) is None
    assert simulate_null(PROBS, 5000, 10, rng).power(0.4, 0.001, rng) == 0.0  # too few draws to reject


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30), st.integers(20, 3000))
def test_pooled_cells_keep_the_mass_and_are_large_enough(weights: list[float], num_samples: int) -> None:
    probs = np.array(weights) / sum(weights)
    groups = pool(probs, num_samples)
    masses = np.bincount(groups, weights=probs)
    assert masses.sum() == pytest.approx(1.0)
    assert (masses * num_samples >= MIN_EXPECTED - 1e-6).all()


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert holm([0.01, 0.02, 0.03], 0.06) == [True, True, True]
    assert holm([], 0.05) == []
