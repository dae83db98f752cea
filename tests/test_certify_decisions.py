"""The statistics of the certificate: p-values that hold, errors of the stated size that are found."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import PROMPT, VOCABULARY, same_vocabulary
from exactness import offer
from outrider.backends.fake import FakeModel
from outrider.core.data import Distribution, Request
from outrider.core.errors import SettingError
from outrider.core.params import Rule, SamplingParams, Verification
from outrider.drafters.model import ModelDrafter
from outrider.lab.certify.certificate import Findings, as_json, certify, reasons
from outrider.lab.certify.decisions import ERRORS, KINDS, RULES, Decisions, ScoreTest, ScoreTests, _Law
from outrider.lab.certify.distribution import MIN_EXPECTED, pool, simulate_null
from outrider.lab.certify.faults import check_fault, verifier_with
from outrider.lab.certify.sampled import CertifyPlan
from outrider.lab.statistics import holm
from outrider.verify import Verifier
from test_certify import OTHER, certificate_of, subject_of

LENGTH = 2
LEVEL = 0.001


def distribution(rng: np.random.Generator) -> Distribution:
    return Distribution(np.arange(6), rng.dirichlet(np.full(6, 2.0)))


def decided(rule: Rule, fault: str | None, seed: int, *, contexts: int = 40, times: int = 40) -> ScoreTests:
    """Decisions about random drafts, each of which is drawn from its distributions."""
    rng = np.random.default_rng(seed)
    tests: ScoreTests = {(name, kind): ScoreTest() for name in RULES for kind in KINDS}
    verification = Verification(rule, "sampled")
    request = Request(PROMPT, SamplingParams(temperature=1.0), verification=verification)
    make = verifier_with(fault)
    for number in range(contexts):
        decisions = Decisions(rule)
        offered = tuple(distribution(rng) for _ in range(LENGTH))
        targets = [distribution(rng) for _ in range(LENGTH + 1)]
        verifier = decisions.recorded(make)(request, 1000 * seed + number)
        pick = verifier.drawing(0)
        assert pick is not None
        drafted = tuple(pick(q, i) for i, q in enumerate(offered))
        draft = offer(drafted, offered)
        verifier.verify(targets, draft, 0)  # type: ignore[arg-type]
        decisions.repeat(make, request, times, seed + number)
        decisions.add_to(tests)
    return tests


@pytest.mark.parametrize("rule", ["token", "block"])
def test_laws_are_what_the_rules_do(rule: Rule) -> None:
    """Enumerated by frequency: 20,000 verdicts of one draft."""
    rng = np.random.default_rng(3)
    offered = tuple(distribution(rng) for _ in range(LENGTH))
    targets = [distribution(rng) for _ in range(LENGTH + 1)]
    draft = offer((1, 4), offered)
    verifier = Verifier(Verification(rule, "sampled"), 1, greedy=False)
    found: Counter[tuple[int, int]] = Counter()
    for _ in range(20_000):
        verdict = verifier.verify(targets, draft, 0)  # type: ignore[arg-type]
        assert verdict.token is not None
        found[verdict.num_accepted, verdict.token] += 1
    law = _Law(rule, targets, draft)
    for i, chance in enumerate(law.accepted(0.0)):
        for token, follows in enumerate(law.following(i, 0.0)):
            share = found[i, token] / 20_000
            assert share == pytest.approx(chance * follows, abs=4.5 * np.sqrt(0.25 / 20_000))


@pytest.mark.parametrize("rule", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_no_false_alarm(rule: Rule) -> None:
    """P-values of sound rules are not smaller than uniform ones, over many seeds."""
    found = [decided(rule, None, seed) for seed in range(20)]
    values = [test.p_value() for tests in found for test in tests.values() if test.outcomes]
    assert not any(test.impossible for tests in found for test in tests.values())
    assert min(values) > 0.001 / len(values)
    assert sum(value < 0.05 for value in values) <= 0.05 * len(values)


@pytest.mark.parametrize(
    ("rule", "sign"),
    [
        ("token", 1),
        ("block", -1),
        pytest.param("token", -1, marks=pytest.mark.slow),
        pytest.param("block", 1, marks=pytest.mark.slow),
    ],
)
def test_the_stated_error_is_found(rule: Rule, sign: int) -> None:
    found, errors = [], []
    for seed in range(6):
        error = decided(rule, None, seed)[rule, "acceptance"].detectable_error(LEVEL)
        assert error is not None and 0.04 < error < 0.15
        errors.append(error)
        wrong = decided(rule, f"acceptance={1 + sign * error}", seed)
        found.append(wrong[rule, "acceptance"].p_value() <= LEVEL)
    assert sum(found) >= 5
    if sign > 0:  # with a factor below 1 a token that must be accepted is rejected, which decides at once
        small = [
            decided(rule, f"acceptance={1 + errors[seed] / 8}", seed)[rule, "acceptance"] for seed in range(3)
        ]
        assert sum(test.p_value() <= LEVEL for test in small) <= 1


def test_an_impossible_outcome_decides_at_once() -> None:
    test = ScoreTest()
    laws = [np.array([1.0, 0.0])] * len(ERRORS)
    test.add(laws, np.array([9, 0]))
    assert test.p_value() == 1.0 and test.detectable_error(LEVEL) is None
    test.add(laws, np.array([9, 1]))
    assert test.p_value() == 0.0 and test.impossible == 1 and test.statistic is None


# Texts

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


# The certificate as a whole

PLAN = CertifyPlan(num_tokens=8, num_seeded=8, num_repeated=1, num_sampled=1, samples=60, repeats=20)


def findings(**changes: object) -> Findings:
    drafter = ModelDrafter(FakeModel(VOCABULARY, OTHER), same_vocabulary())
    return certify(subject_of([drafter]), [PROMPT], replace(PLAN, **changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_power_is_in_the_certificate() -> None:
    found = findings()
    assert found.holds
    document = as_json(certificate_of(found))
    assert 0.01 < document["detectable_acceptance_error"] < 0.12
    more = findings(rule="token", repeats=100).power
    assert more is not None and more < 0.6 * document["detectable_acceptance_error"]
    kinds = {(test["rule"], test["kind"]) for test in document["decisions"]}
    assert {(rule, kind) for rule in ("token", "block") for kind in ("acceptance", "bonus")} < kinds
    assert ("block", "recovered") in kinds


def test_wrong_recovered_tokens_are_found() -> None:
    found = findings(rule="token", fault="no-residual")
    rejected = {test.kind for test in found.decisions if test.rejected}
    assert rejected == {"recovered"}
    alone = replace(found, texts={}, sampled=())
    assert not alone.holds and reasons(alone), "decisions alone decide"


@pytest.mark.parametrize(
    "fault", ["acceptance", "acceptance=", "acceptance=1", "acceptance=-1", "acceptance=x"]
)
def test_a_factor_that_makes_no_sense_is_refused(fault: str) -> None:
    with pytest.raises(SettingError, match="not a known fault"):
        check_fault(fault)
