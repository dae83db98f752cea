"""Logits to distributions: against a slow and obvious reference, and against llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import math

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core.data import Distribution, Logits, SamplingParams
from outrider.core.errors import BackendError
from outrider.sampling import (
    LazyDistributions,
    argmax,
    confidence,
    distribution,
    draw,
    point_mass,
    probability,
)


def reference(row: Logits, params: SamplingParams) -> dict[int, float]:
    """Every filter in turn over plain Python lists, best token first."""
    if params.temperature == 0:
        return {max(range(len(row)), key=lambda i: (row[i], -i)): 1.0}
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    best = float(row[order[0]])
    weights = [math.exp(float(row[i]) - best) for i in order]
    if params.top_p < 1:
        reached, count, total = 0.0, 0, sum(weights)
        while count < len(order) and reached < params.top_p * total:
            reached += weights[count]
            count += 1
        order = order[:count]
    if params.min_p:
        order = [i for i in order if row[i] >= np.float32(best + math.log(params.min_p))]
    tempered = {i: math.exp((float(row[i]) - best) / params.temperature) for i in order}
    total = sum(tempered.values())
    return {i: p / total for i, p in tempered.items() if p / total > 0}


def check(row: Logits, params: SamplingParams) -> Distribution:
    ours, expected = distribution(row, params), reference(row, params)
    assert ours.tokens.tolist() == sorted(expected)
    assert np.allclose(ours.probs, [expected[t] for t in sorted(expected)], rtol=1e-9, atol=1e-300)
    assert ours.probs.min() > 0 and abs(ours.probs.sum() - 1) < 1e-12
    return ours


LOGITS = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([-math.inf, 0.0, 1.0, 1.0, -3e38, 1e-30, -1e-30]),
)


@st.composite
def params(draw_value: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw_value(st.sampled_from([0.0, 0.1, 0.8, 1.0, 5.0])),
        top_k=draw_value(st.sampled_from([0, 1, 2, 5, 40, 10**9])),
        # Not on the edge that rounding decides: sums of equal weights reach round shares exactly.
        top_p=draw_value(st.sampled_from([1e-6, 0.3011, 0.7237, 0.9513, 1.0])),
        min_p=draw_value(st.sampled_from([0.0, 0.0513, 0.5119, 1.0])),
    )


@given(values=st.lists(LOGITS, min_size=1, max_size=30), settings=params())
@example(values=[0.0, 1.0, 1.0], settings=SamplingParams(1.0, 2, 1.0, 0.0))
def test_the_filters_against_the_reference(values: list[float], settings: SamplingParams) -> None:
    row = np.array(values, dtype=np.float32)
    if not np.isfinite(row.max()):
        with pytest.raises(BackendError):
            distribution(row, settings)
        return
    check(row, settings)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("size", [1000, 5000, 20_011])
@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams(0.8, 0, 0.9513, 0),
        SamplingParams(0.8, 0, 0.1037, 0),
        SamplingParams(0.8, 0, 0.9999, 0.0511),
        SamplingParams(1.0, 7, 1, 0),
        SamplingParams(1.0, 40, 0.9513, 0.0511),
        SamplingParams(1.0, 30_000, 0.9513, 0),
        SamplingParams(1.3, 0, 1, 0.0511),
        SamplingParams(1.3, 0, 1, 0),
    ],
)
def test_large_vocabularies_against_the_reference(size: int, scale: float, settings: SamplingParams) -> None:
    rng = np.random.default_rng(size)
    row = (rng.standard_normal(size) * scale).astype(np.float32)
    ours, expected = distribution(row, settings), reference(row, settings)
    # The total of a large vocabulary is summed in single precision: one token more or less.
    common = set(ours.tokens.tolist()) & set(expected)
    assert len(ours.tokens) + len(expected) - 2 * len(common) <= (2 if settings.top_p < 1 else 0)
    assert all(math.isclose(probability(ours, t), expected[t], rel_tol=2e-3) for t in common)
    assert (np.diff(ours.tokens) > 0).all()


@pytest.mark.parametrize("k", [1, 3, 12, 13, 40])
def test_the_lower_id_wins_a_tie_in_any_block(k: int) -> None:
    row = np.zeros(128 * 60 + 5, dtype=np.float32)
    row[[100, 200, 7000, 7684]] = 1
    row[300:310] = 0.5
    check(row, SamplingParams(1.0, k, 1.0, 0.0))


def test_masked_rows_keep_only_what_is_left() -> None:
    row = np.full(128 * 60, -np.inf, dtype=np.float32)
    row[[5, 6000]] = (1.0, 0.0)
    for settings in (SamplingParams(), SamplingParams(1.0, 0, 1, 0), SamplingParams(1.0, 0, 0.9999, 0)):
        assert check(row, settings).tokens.tolist() == [5, 6000]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-3, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    row = np.array([0.0, 3.0, 3.0, -3e38], dtype=np.float32)
    ours = distribution(row, SamplingParams(temperature, 0, 1, 0))
    assert ours.tokens.tolist() == ([0, 1, 2, 3] if temperature > 1 else [1, 2])
    assert ours.probs.tolist() == pytest.approx([1 / len(ours.probs)] * len(ours.probs))


def test_no_probability_is_zero() -> None:
    row = np.zeros(4, dtype=np.float32)
    row[3] = -744.45  # e to this power is the smallest number there is; shared by three, it is none
    assert distribution(row, SamplingParams(1.0, 0, 1, 0)).probs.min() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3, 999])
def test_logits_that_are_no_numbers_are_refused(bad: float, at: int) -> None:
    row = np.zeros(1000, dtype=np.float32)
    row[at] = bad
    for settings in (SamplingParams(0), SamplingParams(), SamplingParams(1.0, 0, 0.9, 0)):
        with pytest.raises(BackendError, match="logits"):
            distribution(row, settings)
    with pytest.raises(BackendError):
        argmax(np.full(4, -np.inf, dtype=np.float32))


def test_confidence_is_the_untempered_probability() -> None:
    row = np.array([1.0, 2.0, -np.inf, 0.5], dtype=np.float32)
    weights = np.exp(row.astype(np.float64))
    assert confidence(row, 1) == pytest.approx(weights[1] / weights.sum())
    assert confidence(np.array([3e38, -3e38], dtype=np.float32), 0) == 1


@given(seed=st.integers(0, 2**32), scale=st.floats(0.1, 5), peak=st.floats(0, 30))
def test_confidence_over_a_large_vocabulary_is_never_too_low_and_sees_every_logit(
    seed: int, scale: float, peak: float
) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(64 * 100 + 7) * scale).astype(np.float32)
    row[rng.integers(len(row))] += peak
    best = argmax(row)
    exact = 1 / np.exp(row.astype(np.float64) - row[best]).sum()
    assert exact * (1 - 1e-5) <= confidence(row, best) <= min(1, 64.001 * exact)
    for rival in rng.permutation(len(row)):
        if rival % 100 != best % 100:  # a group of its own: an equal candidate halves the confidence
            again = row.copy()
            again[rival] = row[best]
            assert confidence(again, argmax(again)) <= 0.5
            break


@given(seed=st.integers(0, 2**32), weights=st.lists(st.floats(1e-9, 1), min_size=1, max_size=6))
def test_a_draw_inverts_the_cumulative_distribution(seed: int, weights: list[float]) -> None:
    probs = np.array(weights) / np.sum(weights)
    tokens = np.arange(len(probs), dtype=np.int64) * 3
    rng, same = np.random.default_rng(seed), np.random.default_rng(seed)
    token = draw(Distribution(tokens, probs), rng)
    if len(weights) == 1:
        assert token == 0 and rng.random() == same.random()
        return
    u = same.random()
    below, upto = probs[tokens < token].sum(), probs[tokens <= token].sum()
    assert below - 1e-12 <= u <= upto + 1e-12
    assert rng.random() == same.random()


def test_probability_looks_up_the_support() -> None:
    uneven = Distribution(np.array([2, 5], dtype=np.int64), np.array([0.25, 0.75]))
    assert [probability(uneven, t) for t in (0, 2, 3, 5, 9)] == [0, 0.25, 0, 0.75, 0]
    assert probability(point_mass(4), 4) == 1


def test_rows_are_looked_at_only_when_asked_for() -> None:
    rows = np.array([[0, 1], [np.nan, 0], [1, 0]], dtype=np.float32)
    lazy = LazyDistributions(rows, SamplingParams(0))
    assert len(lazy) == 3
    assert [int(lazy[i].tokens[0]) for i in (0, 2, -1)] == [1, 0, 0]
    assert [int(d.tokens[0]) for d in lazy[::2]] == [1, 0]
    with pytest.raises(BackendError):
        lazy[1]


def llama_cpp_distribution(row: Logits, params: SamplingParams) -> dict[int, float]:
    """What llama.cpp's sampler chain leaves of a row."""
    data = (lib.llama_token_data * len(row))(
        *(lib.llama_token_data(id=i, logit=float(x), p=0.0) for i, x in enumerate(row))
    )
    array = lib.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in (
        lib.llama_sampler_init_top_k(params.top_k),
        lib.llama_sampler_init_top_p(params.top_p, 1),
        lib.llama_sampler_init_min_p(params.min_p, 1),
        lib.llama_sampler_init_temp(params.temperature),
        lib.llama_sampler_init_dist(1),
    ):
        lib.llama_sampler_chain_add(chain, sampler)
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    left = {int(array.data[i].id): float(array.data[i].logit) for i in range(array.size)}
    lib.llama_sampler_free(chain)
    logits = np.array(list(left.values()), dtype=np.float64)
    with np.errstate(under="ignore"):
        weights = np.exp(logits - logits.max())
    return {t: p for t, p in zip(left, (weights / weights.sum()).tolist(), strict=True) if p > 0}


@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams(),
        SamplingParams(0.3, 40, 0.9, 0.0),
        SamplingParams(1.5, 5, 1.0, 0.1),
        SamplingParams(1.0, 0, 0.7, 0.0),
        SamplingParams(1.0, 0, 1.0, 0.02),
        SamplingParams(0.7, 0, 1.0, 0.0),
        SamplingParams(2.0, 10_000, 0.5, 0.3),
        SamplingParams(1.0, 1, 0.5, 0.3),
    ],
)
@pytest.mark.parametrize("size", [7, 300, 3000])
def test_the_chain_is_that_of_llama_cpp(settings: SamplingParams, size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        row = (rng.standard_normal(size) * rng.choice([0.5, 2.0, 6.0])).astype(np.float32)
        theirs, ours = llama_cpp_distribution(row, settings), distribution(row, settings)
        assert ours.tokens.tolist() == sorted(theirs)
        assert np.abs(ours.probs - [theirs[t] for t in sorted(theirs)]).max() < 1e-5
