"""Logits to distributions: against a slow and obvious reference."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engines import VOCABULARY, sampler
from outrider.backends.fake import FakeVocabulary
from outrider.core.contracts import Constraint
from outrider.core.data import Distribution, Logits, Mask
from outrider.core.errors import BackendError, ConstraintError
from outrider.core.params import SamplingParams
from outrider.sampling import (
    LazyDistributions,
    RequestSampler,
    argmax,
    draw,
    most_likely,
    point_mass,
    probability,
)
from outrider.sampling.chain import fewest_reaching, ranked

EVERYTHING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


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
    ours, expected = sampler(params).distribution(row, ()), reference(row, params)
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
@example(values=[0.0, 1.0, 1.0], settings=replace(EVERYTHING, top_k=2))
def test_the_filters_against_the_reference(values: list[float], settings: SamplingParams) -> None:
    row = np.array(values, dtype=np.float32)
    if not np.isfinite(row.max()):
        with pytest.raises(BackendError):
            sampler(settings).distribution(row, ())
        return
    check(row, settings)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("size", [1000, 5000, 20_011])
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.8, "top_p": 0.9513},
        {"temperature": 0.8, "top_p": 0.1037},
        {"temperature": 0.8, "top_p": 0.9999, "min_p": 0.0511},
        {"top_k": 7},
        {"top_k": 40, "top_p": 0.9513, "min_p": 0.0511},
        {"top_k": 30_000, "top_p": 0.9513},
        {"temperature": 1.3, "min_p": 0.0511},
        {"temperature": 1.3},
    ],
)
def test_large_vocabularies_against_the_reference(size: int, scale: float, given: dict[str, Any]) -> None:
    rng, settings = np.random.default_rng(size), replace(EVERYTHING, **given)
    row = (rng.standard_normal(size) * scale).astype(np.float32)
    ours, expected = sampler(settings).distribution(row, ()), reference(row, settings)
    # The total of a large vocabulary is summed in single precision: one token more or less.
    common = set(ours.tokens.tolist()) & set(expected)
    assert len(ours.tokens) + len(expected) - 2 * len(common) <= (2 if settings.top_p < 1 else 0)
    assert all(math.isclose(probability(ours, t), expected[t], rel_tol=2e-3) for t in common)
    assert (np.diff(ours.tokens) > 0).all()


@given(
    seed=st.integers(0, 2**32),
    steps=st.sampled_from([1, 3, 50, 10**6]),
    share=st.floats(0, 1),
    beyond=st.booleans(),
)
def test_the_fewest_values_that_reach_a_mass(seed: int, steps: int, share: float, beyond: bool) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.integers(0, steps, 5000) * (rng.uniform(0.01, 20) / steps)).astype(np.float32)
    values[:2] = rng.choice([-3e38, 30, values[0]], 2)
    weights = rng.integers(0, 100, 5000).astype(np.float64)
    mass = math.floor(share * weights.sum())  # sums of whole numbers are exact
    order = sorted(range(5000), key=lambda i: (-values[i], i))
    reached = np.cumsum(weights[order])
    count = int(np.sum(reached <= mass if beyond else reached < mass)) + 1
    assert fewest_reaching(values, weights, mass, beyond=beyond).tolist() == sorted(order[:count])


@pytest.mark.parametrize("k", [1, 3, 12, 13, 40])
def test_the_lower_id_wins_a_tie_in_any_block(k: int) -> None:
    row = np.zeros(128 * 60 + 5, dtype=np.float32)
    row[[100, 200, 7000, 7684]] = 1
    row[300:310] = 0.5
    check(row, replace(EVERYTHING, top_k=k))


@pytest.mark.parametrize("num_left", [1, 39, 40, 41, 200])
def test_a_row_of_which_a_mask_leaves_fewer_than_top_k(num_left: int) -> None:
    rng = np.random.default_rng(num_left)
    row = np.full(128 * 60 + 5, -np.inf, dtype=np.float32)
    row[rng.choice(len(row), num_left, replace=False)] = rng.standard_normal(num_left)
    assert len(check(row, replace(EVERYTHING, top_k=40)).tokens) == min(num_left, 40)
    assert len(check(row, EVERYTHING).tokens) == num_left
    check(row, replace(EVERYTHING, top_p=0.9999))
    # Dynamic temperature counts those too that llama.cpp still lists at -inf.
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    assert ranked(row, 40).tolist() == order[:40]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-3, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    row = np.array([0.0, 3.0, 3.0, -3e38], dtype=np.float32)
    ours = sampler(replace(EVERYTHING, temperature=temperature)).distribution(row, ())
    assert ours.tokens.tolist() == ([0, 1, 2, 3] if temperature > 1 else [1, 2])
    assert ours.probs.tolist() == pytest.approx([1 / len(ours.probs)] * len(ours.probs))


def test_no_probability_is_zero() -> None:
    row = np.zeros(4, dtype=np.float32)
    row[3] = -744.45  # e to this power is the smallest number there is; shared by three, it is none
    assert sampler(EVERYTHING).distribution(row, ()).probs.min() > 0


@pytest.mark.parametrize("size", [4, 1000, 64 * 300 + 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3, -1])
def test_logits_that_are_no_numbers_are_refused(size: int, bad: float, at: int) -> None:
    row = np.zeros(size, dtype=np.float32)
    row[at] = bad
    settings = SamplingParams(temperature=0), SamplingParams(), replace(EVERYTHING, top_p=0.9)
    asks: list[Callable[[Logits], object]] = [argmax, most_likely]
    asks += [partial(sampler(each).distribution, drafted=()) for each in settings]
    for unusable in (row, np.full(size, -np.inf, dtype=np.float32)):
        for ask in asks:
            with pytest.raises(BackendError, match="logits"):
                ask(unusable)


def test_confidence_is_the_untempered_probability() -> None:
    row = np.array([1.0, 2.0, -np.inf, 0.5], dtype=np.float32)
    weights = np.exp(row.astype(np.float64))
    token, confidence = most_likely(row)
    assert token == 1 and confidence == pytest.approx(weights[1] / weights.sum())
    assert most_likely(np.array([3e38, -3e38], dtype=np.float32)) == (0, 1)
    reduced = np.random.default_rng(1).standard_normal(12_000).astype(np.float32)  # no estimate yet
    token, confidence = most_likely(reduced)
    exact = 1 / np.exp(reduced - reduced[token]).sum(dtype=np.float64)
    assert token == argmax(reduced) and confidence == pytest.approx(exact)


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([30, 5000, 20_011]),
    steps=st.sampled_from([3, 10**6]),
    top_k=st.sampled_from([0, 1, 2, 40, 64, 65]),
)
def test_one_look_at_a_row_tells_as_much_as_two(seed: int, size: int, steps: int, top_k: int) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.integers(0, steps, size) * (12 / steps)).astype(np.float32)
    for settings in (SamplingParams(top_k=top_k), SamplingParams(temperature=0)):
        asked = sampler(settings)
        token, confidence, probs = asked.look(row, with_distribution=True)
        assert (token, confidence) == most_likely(row) == asked.look(row, with_distribution=False)[:2]
        expected = sampler(settings).distribution(row, ())
        assert probs is not None and probs.tokens.tolist() == expected.tokens.tolist()
        assert probs.probs.tolist() == expected.probs.tolist()


@given(seed=st.integers(0, 2**32), scale=st.floats(0.1, 5), peak=st.floats(0, 30))
def test_confidence_over_a_large_vocabulary_is_never_too_low_and_sees_every_logit(
    seed: int, scale: float, peak: float
) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(64 * 300 + 7) * scale).astype(np.float32)
    row[rng.integers(len(row))] += peak
    best = argmax(row)
    exact = 1 / np.exp(row.astype(np.float64) - row[best]).sum()
    token, sure = most_likely(row)
    assert token == best
    assert exact * (1 - 1e-5) <= sure <= min(1, 64.001 * exact)
    for rival in rng.permutation(len(row)):
        if rival % 300 != best % 300:  # a group of its own: an equal candidate halves the confidence
            again = row.copy()
            again[rival] = row[best]
            assert most_likely(again)[0] == argmax(again) == min(best, rival)
            assert most_likely(again)[1] <= 0.5
            break


@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.floats(1e-9, 1), min_size=1, max_size=6),
    times=st.sampled_from([1, 500]),
)
def test_a_draw_inverts_the_cumulative_distribution(seed: int, weights: list[float], times: int) -> None:
    weights = weights * (times if len(weights) > 1 else 1)
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
    lazy = LazyDistributions(
        rows, RequestSampler(SamplingParams(temperature=0), FakeVocabulary("a"), [0]), [0, 0]
    )
    assert len(lazy) == 3
    assert [int(lazy[i].tokens[0]) for i in (0, 2)] == [1, 0]
    for ask in (lazy.__getitem__, lazy.row):
        with pytest.raises(IndexError):
            ask(3)
    with pytest.raises(BackendError):
        lazy[1]


def test_every_row_stands_after_the_drafted_tokens_before_it() -> None:
    rows = np.array([[2, 1, 0], [2, 1, 0], [2, 1, 0]], dtype=np.float32)
    settings = SamplingParams(temperature=0, presence_penalty=1.5, banned=(2,))
    lazy = LazyDistributions(rows, RequestSampler(settings, FakeVocabulary("ab"), [0]), [1, 0])
    assert [lazy.row(i).tolist() for i in range(3)] == [
        [0.5, 1, -math.inf],
        [0.5, -0.5, -math.inf],
        [0.5, -0.5, -math.inf],
    ]
    assert [int(d.tokens[0]) for d in lazy] == [1, 0, 0]
    assert [lazy.choice(i) for i in range(3)] == [1, 0, 0]
    assert rows.tolist() == [[2, 1, 0]] * 3


def test_a_ban_holds_while_an_end_is_barred() -> None:
    row = np.linspace(1, 0, VOCABULARY.size).astype(np.float32)
    settings = SamplingParams(temperature=0.0, banned=(0,), min_tokens=3)
    assert sampler(settings).distribution(row, ()).tokens.tolist() == [1]


def test_xtc_spares_the_last_of_equals_as_llama_cpp_does() -> None:
    row = np.full(VOCABULARY.size, -np.inf, dtype=np.float32)
    row[:3] = np.log([0.4, 0.3, 0.3])
    settings = replace(EVERYTHING, xtc_probability=1.0, xtc_threshold=0.1)
    assert sampler(settings).distribution(row, ()).tokens.tolist() == [2]


# Under a constraint: what is not allowed is barred before anything else chooses


def masked(mask: Mask, params: SamplingParams = EVERYTHING) -> RequestSampler:
    constraint = SimpleNamespace(allowed=lambda _drafted: mask)
    return RequestSampler(params, VOCABULARY, (), cast(Constraint, constraint))


rows = arrays.arrays(np.float32, VOCABULARY.size, elements=st.floats(-50, 50, width=32))
masks = arrays.arrays(np.bool_, VOCABULARY.size, elements=st.booleans()).filter(lambda mask: bool(mask.any()))


@given(row=rows, mask=masks)
def test_a_mask_bars_what_it_does_not_allow_and_leaves_the_rest(row: np.ndarray, mask: Mask) -> None:
    before = row.copy()
    adjusted = masked(mask).adjust(row, ())
    assert (adjusted[mask] == row[mask]).all() and (adjusted[~mask] == -np.inf).all()
    assert (row == before).all()
    p = masked(mask).distribution(row, ())
    assert set(p.tokens.tolist()) <= set(np.flatnonzero(mask).tolist())


@given(row=rows, mask=masks, k=st.integers(1, VOCABULARY.size))
def test_top_k_counts_allowed_tokens(row: np.ndarray, mask: Mask, k: int) -> None:
    p = masked(mask, replace(EVERYTHING, top_k=k)).distribution(row, ())
    assert len(p.tokens) == min(k, int(mask.sum()))


def test_bias_and_bans_beside_a_mask() -> None:
    mask, row = np.arange(VOCABULARY.size) < 2, np.zeros(VOCABULARY.size, np.float32)
    biased = replace(EVERYTHING, temperature=0, logit_bias=((1, 9.0), (5, 99.0)))
    assert masked(mask, biased).distribution(row, ()).tokens.tolist() == [1]
    with pytest.raises(ConstraintError, match="none is left"):
        masked(mask, replace(EVERYTHING, banned=(0, 1))).distribution(row, ())
