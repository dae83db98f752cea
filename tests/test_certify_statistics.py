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


def test_a_shift_is_found() -> None:
    rng = np.random.default_rng(3)
    null = simulate_null(PROBS, 2000, 20_000, rng)
    shifted = PROBS + np.array([0.06, -0.03, -0.03, 0, 0, 0])
    found = np.mean(
        [null.p_value(null.statistic(rng.multinomial(2000, shifted))) <= 0.01 for _ in range(200)]
    )
    assert found > 0.95


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
