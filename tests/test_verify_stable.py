"""The seed-stable rule: noise that is fixed by seed and position, and what it picks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactness import dense, language
from outrider.backends.fake import FakeVocabulary
from outrider.core.data import Distribution, Draft
from outrider.core.params import SamplingParams, Verification
from outrider.sampling import LazyDistributions, RequestSampler
from outrider.verify import Verifier
from outrider.verify.rules import pick, uniforms, verify_choices

NUM_SEEDS = 6000


def picks(p: Distribution, position: int = 0, num: int = NUM_SEEDS) -> np.ndarray:
    return np.array([pick(p, seed, position) for seed in range(num)])


@pytest.mark.parametrize("seed", range(3))
def test_what_is_picked_follows_the_distribution(seed: int) -> None:
    """Over the seeds of one position, and over the positions of one seed."""
    p = language(4, seed)(())
    by_position = np.array([pick(dense(p), 7, position) for position in range(NUM_SEEDS)])
    for found in (picks(dense(p)), by_position):
        counts = np.bincount(found, minlength=4)
        chi_square = float(((counts - NUM_SEEDS * p) ** 2 / (NUM_SEEDS * p)).sum())
        assert chi_square < 21.1  # 3 degrees of freedom: 1 in 10,000


def test_neighbouring_positions_pick_independently() -> None:
    p = dense([0.5, 0.3, 0.2])
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (picks(p, 4), picks(p, 5)), 1)
    expected = NUM_SEEDS * np.outer(p.probs, p.probs)
    assert float(((pairs - expected) ** 2 / expected).sum()) < 31.8  # 8 degrees: 1 in 10,000


def test_the_noise_of_a_token_does_not_depend_on_the_others() -> None:
    """Else a filter that drops a token would change which of the others is picked."""
    everything, some = np.arange(1000, dtype=np.int64), np.array([3, 500, 999], dtype=np.int64)
    assert (uniforms(5, 9, everything)[some] == uniforms(5, 9, some)).all()
    assert (
        len(np.unique(np.concatenate([uniforms(s, i, everything) for s in (0, 1) for i in (0, 1)]))) == 4000
    )


@given(seed=st.integers(0, 2**64), position=st.integers(0, 10**6), token=st.integers(0, 2**31))
def test_the_noise_is_a_number_between_the_ends(seed: int, position: int, token: int) -> None:
    [chance] = uniforms(seed, position, np.array([token], dtype=np.int64))
    assert 0 < chance < 1


@given(
    weights=st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0]), min_size=2, max_size=6).filter(any),
    seed=st.integers(0, 2**32),
)
def test_what_is_picked_is_possible(weights: list[float], seed: int) -> None:
    probs = np.array(weights) / sum(weights)
    tokens = np.flatnonzero(probs > 0)
    assert pick(Distribution(tokens.astype(np.int64), probs[tokens]), seed, 3) in tokens


@pytest.mark.parametrize("pair", range(4))
def test_the_acceptance_reaches_its_bound(pair: int) -> None:
    """Two distributions that race with the same noise agree at least (1 - TV) / (1 + TV) of the time."""
    p, q = language(4, pair)(()), language(4, pair + 20)(())
    tv = float(np.abs(p - q).sum() / 2)
    agreed = float((picks(dense(p)) == picks(dense(q))).mean())
    error = 0.5 / NUM_SEEDS**0.5
    assert agreed > (1 - tv) / (1 + tv) - 4 * error
    assert agreed < 1 - tv + 4 * error  # no coupling does better
    independent = float((p * q).sum())
    assert agreed > independent + 4 * error


@given(
    seed=st.integers(0, 2**32),
    position=st.integers(0, 1000),
    tokens=st.lists(st.integers(0, 2), max_size=3),
    helpful=st.integers(0, 3),
)
def test_whatever_is_drafted_the_text_is_plain_decodings(
    seed: int, position: int, tokens: list[int], helpful: int
) -> None:
    p = language(3, 1)
    plain: tuple[int, ...] = ()
    for i in range(4):
        plain = (*plain, pick(dense(p(plain)), seed, position + i))
    drafted = (*plain[:helpful], *tokens)[:3]
    rows = [dense(p(drafted[:i])) for i in range(len(drafted) + 1)]
    verdict = verify_choices(lambda i: pick(rows[i], seed, position + i), drafted)
    assert (*drafted[: verdict.num_accepted], verdict.token) == plain[: verdict.num_accepted + 1]
    assert verdict.num_accepted >= min(helpful, len(drafted))


def test_a_verdict_uses_the_noise_of_its_place_in_the_text() -> None:
    sampler = RequestSampler(SamplingParams(temperature=1.0), FakeVocabulary("abc"), ())
    rows = LazyDistributions(np.zeros((1, 4), dtype=np.float32), sampler, ())
    verifier = Verifier(Verification("stable"), 3, greedy=False)
    found = [verifier.verify(rows, Draft(), position).token for position in range(20)]
    assert found == [pick(rows[0], 3, position) for position in range(20)]
    assert len(set(found)) > 1
