"""The rules' parts: properties over any distributions, and one request's choice of a rule."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import VOCABULARY, sampler
from exactness import Drawn, Rng, dense, expected_accepted, explore, language, offer, verdicts
from outrider.core.data import Distribution, Draft, DraftToken, Request
from outrider.core.errors import SettingError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.sampling import LazyDistributions, point_mass, probability
from outrider.verify import Verifier
from outrider.verify.rules import (
    accept_probability,
    block_accept,
    block_ratios,
    excess,
    residual,
    verify_block,
    verify_choices,
    verify_tokens,
)

SIZE = 4
WEIGHTS = st.lists(
    st.sampled_from([0.0, 1e-300, 1e-12, 0.25, 0.25 + 1e-16, 0.5, 1.0]), min_size=SIZE, max_size=SIZE
)
DISTRIBUTIONS = WEIGHTS.filter(any).map(dense)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0)


def spread(distribution: Distribution) -> np.ndarray:
    full = np.zeros(SIZE)
    full[distribution.tokens] = distribution.probs
    return full


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS)
def test_acceptance_and_residual_add_up_to_the_target(p: Distribution, q: Distribution) -> None:
    total, rejected = np.zeros(SIZE), 0.0
    for token, chance in zip(q.tokens.tolist(), q.probs.tolist(), strict=True):
        accept = accept_probability(p, q, token)
        assert 0 <= accept <= 1
        total[token] += chance * accept
        rejected += chance * (1 - accept)
    rest = residual(p, q)
    assert rest.probs.min() > 0 and abs(rest.probs.sum() - 1) < 1e-12 and (np.diff(rest.tokens) > 0).all()
    assert set(rest.tokens.tolist()) <= set(p.tokens.tolist())
    assert np.abs(total + rejected * spread(rest) - spread(p)).max() < 1e-12


@given(p=DISTRIBUTIONS, q=DISTRIBUTIONS, scale=st.floats(0, 1))
def test_the_excess_is_what_the_target_has_more(p: Distribution, q: Distribution, scale: float) -> None:
    expected = np.maximum(scale * spread(p) - spread(q), 0)[p.tokens]
    assert excess(p, q, scale) == pytest.approx(expected, abs=0)


@given(p=DISTRIBUTIONS)
def test_equal_distributions_leave_the_target(p: Distribution) -> None:
    same = Distribution(p.tokens.copy(), p.probs.copy())
    assert residual(p, p) is p and residual(p, same) is p
    assert all(accept_probability(p, same, token) == 1 for token in p.tokens.tolist())


def test_a_token_that_the_target_rules_out_never_stands() -> None:
    p, q = dense([1, 1, 0, 0]), dense([1, 0, 1, 0])
    assert accept_probability(p, q, 3) == 0  # nor does the draft give it any chance
    for rule in (verify_tokens, verify_block):
        assert {v.num_accepted for v, _ in verdicts(rule, [p, p], offer((3,), (q,)))} == {0}


# Verdicts

CHAINS = st.integers(0, 3).flatmap(
    lambda n: st.tuples(
        st.lists(DISTRIBUTIONS, min_size=n + 1, max_size=n + 1),
        st.lists(st.tuples(st.integers(0, SIZE - 1), DISTRIBUTIONS), min_size=n, max_size=n),
    )
)


@given(chain=CHAINS, certain=st.booleans())
def test_verdicts_are_well_formed(
    chain: tuple[list[Distribution], list[tuple[int, Distribution]]], certain: bool
) -> None:
    """Whatever is claimed of the drafted tokens, even that they cannot be drawn."""
    target, offered = chain
    draft = offer([token for token, _ in offered], None if certain else [q for _, q in offered])
    for rule in (verify_tokens, verify_block):
        total = 0.0
        for verdict, weight in verdicts(rule, target, draft):
            n = verdict.num_accepted
            total += weight
            assert 0 <= n <= len(draft)
            assert verdict.kind == ("bonus" if n == len(draft) else "recovered")
            assert verdict.token is not None and probability(target[n], verdict.token) > 0
            assert all(probability(target[i], draft.tokens[i]) > 0 for i in range(n))
            if certain and n < len(draft):
                assert verdict.token != draft.tokens[n]
        assert total == pytest.approx(1, abs=1e-12)
    known = [point_mass(token) for token in draft.tokens] if certain else [q for _, q in offered]
    ratios = block_ratios(target, draft.tokens, known)
    chances = [block_accept(target, known, ratios, i) for i in range(1, len(ratios))]
    assert all(0 <= x <= 1 for x in (*ratios, *chances))
    assert all(chance <= 1e-12 for ratio, chance in zip(ratios[1:], chances, strict=True) if ratio == 0)


def test_a_block_whose_distributions_differ_by_rounding_alone_is_judged() -> None:
    """The excess is then so small that adding 1 to it would lose it."""
    p, q = dense([1.0, 0.3, 2e-17]), dense([1.0, 0.3, 1e-17])
    draft = offer((0, 0), (p, q))
    ratios = block_ratios([p, p, p], draft.tokens, (p, q))
    assert [block_accept([p, p, p], (p, q), ratios, i) for i in (1, 2)] == [1.0, 1.0]
    assert {v.num_accepted for v, _ in verdicts(verify_block, [p, p, p], draft)} == {2}


@given(
    own=st.lists(st.integers(0, 2), min_size=4, max_size=4), drafted=st.lists(st.integers(0, 2), max_size=3)
)
def test_what_is_kept_of_a_draft_is_what_the_target_chooses(own: list[int], drafted: list[int]) -> None:
    verdict = verify_choices(own.__getitem__, drafted)
    emitted = (*drafted[: verdict.num_accepted], verdict.token)
    assert emitted == tuple(own[: len(emitted)])
    assert verdict.num_accepted == len(drafted) or drafted[verdict.num_accepted] != verdict.token
    assert verdict.kind == ("bonus" if verdict.num_accepted == len(drafted) else "recovered")


def test_a_row_that_rules_out_tokens_is_no_error() -> None:
    row = np.full((1, VOCABULARY.size), -np.inf, dtype=np.float32)
    row[0, 3] = 1.0
    verifier = Verifier(Verification(), 1, greedy=False)
    assert verifier.verify(LazyDistributions(row, sampler(SAMPLED), ()), Draft(), 0).token == 3


def test_a_text_that_no_draft_may_touch_is_drawn_by_the_stable_rule() -> None:
    usual = Verification()
    assert usual.keeps_text(greedy=True) and not usual.keeps_text(greedy=False)
    assert usual.bitwise(greedy=True) == usual
    assert usual.bitwise(greedy=False) == Verification("stable")
    assert Verification("stable").bitwise(greedy=False).keeps_text(greedy=False)
    for verification in (Verification("token"), Verification("block")):
        with pytest.raises(SettingError, match="bitwise"):
            verification.bitwise(greedy=False)


def test_what_verification_does_not_know_is_refused() -> None:
    for settings in ({"rule": "none"}, {"draft_sampling": "some"}):
        with pytest.raises(SettingError):
            Verification(**cast(Any, settings))


# One request's Verifier


def verifier(
    rule: Rule = "auto", draft_sampling: DraftSampling = "auto", *, greedy: bool = False, seed: int = 5
) -> Verifier:
    return Verifier(Verification(rule, draft_sampling), seed, greedy=greedy)


def test_greedy_requests_never_draw_nor_compare() -> None:
    for rule in ("auto", "token", "block", "stable"):
        for kind in ("auto", "greedy", "sampled"):
            made = verifier(rule, kind, greedy=True)
            assert made.drawing(0) is None and not made.compares and "greedy" in made.name


@pytest.mark.parametrize(
    ("rule", "kind", "draws", "compares"),
    [
        ("auto", "auto", False, True),
        ("block", "sampled", True, False),
        ("token", "sampled", True, False),
        ("block", "greedy", False, False),
        ("stable", "auto", True, False),
        ("stable", "greedy", False, False),
    ],
)
def test_what_is_drawn_is_what_is_said(rule: Rule, kind: DraftSampling, draws: bool, compares: bool) -> None:
    made = verifier(rule, kind)
    assert (made.drawing(0) is not None, made.compares) == (draws, compares)
    assert made.name.endswith(
        "the better of sampled and most likely drafts"
        if compares
        else "sampled drafts"
        if draws
        else "most likely drafts"
    )


def in_a_row(p: Sequence[float], num: int) -> LazyDistributions:
    return LazyDistributions(
        np.log(np.array([[*p, *[1e-30] * (VOCABULARY.size - len(p))]] * num, dtype=np.float32)),
        sampler(SAMPLED),
        (0,) * (num - 1),
    )


def test_auto_goes_over_to_the_kind_that_is_accepted_more() -> None:
    """Flat and alike: sampled tokens are always accepted. One-sided p, flat q: the most likely does."""
    flat, peak = (0.26, 0.25, 0.25, 0.24), (0.97, 0.01, 0.01, 0.01)
    made = verifier()
    believed = Draft((DraftToken(0, "draft", 0.5, mode_of=dense(flat)),))
    made.verify(in_a_row(flat, 2), believed, 0)
    assert made.drawing(1) is not None
    for _ in range(40):
        made.verify(in_a_row(peak, 2), offer((0,), (dense(flat),)), 1)
    assert made.drawing(2) is None
    for _ in range(40):
        made.verify(in_a_row(flat, 2), offer((0,)), 2)  # a lookup teaches nothing
    assert made.drawing(3) is None


def test_kinds_are_compared_in_every_step_at_first_and_in_some_later() -> None:
    """A text that changes its mind is still noticed."""
    flat, peak = (0.26, 0.25, 0.25, 0.24), (0.97, 0.01, 0.01, 0.01)
    made, due = verifier(), []
    for p in (flat, peak):
        for _ in range(240):
            due.append(made.compares)
            made.verify(in_a_row(p, 2), offer((0,), (dense(flat),)), 0)
        assert (made.drawing(0) is not None) == (p is flat)
    assert all(due[:64]) and sum(due[240:]) == 60
    assert len({step % 4 for step, is_due in enumerate(due[240:]) if is_due}) == 1


def test_only_positions_that_were_reached_teach() -> None:
    """A later position is looked at only if all before it stood, as the text will have it."""
    made = verifier()
    believed = (dense((0, 0, 0, 1)), dense((0.5, 0.5)))
    items = [DraftToken(token, "draft", 0.5, mode_of=q) for token, q in zip((3, 0), believed, strict=True)]
    made.verify(in_a_row((0.5, 0.5), 3), Draft(tuple(items)), 0)
    assert made.drawing(1) is None


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_rule_in_force_is_the_one_asked_for(rule: Rule) -> None:
    p, q = language(3, 1), language(3, 2)

    class Enumerated(Verifier):
        def __init__(self, rng: Rng) -> None:
            super().__init__(Verification(rule, "sampled"), 0, greedy=False)
            self._rng = rng

    def run(rng: Rng) -> int:
        made = Enumerated(rng)
        draw = made.drawing(0)
        assert draw is not None
        tokens: tuple[int, ...] = ()
        probs = []
        for i in range(2):
            probs.append(dense(q(tokens)))
            tokens = (*tokens, draw(probs[-1], i))
        rows = [dense(p(tokens[:i])) for i in range(3)]
        return made.verify(cast(LazyDistributions, rows), offer(tokens, probs), 0).num_accepted

    expected = {"token": verify_tokens, "block": verify_block}
    kept = sum(n * weight for n, weight in explore(run))
    assert kept == pytest.approx(expected_accepted(expected[rule], p, Drawn(q, 2)), abs=1e-12)
    other = expected["block" if rule == "token" else "token"]
    assert abs(kept - expected_accepted(other, p, Drawn(q, 2))) > 1e-6


def test_a_request_gets_its_own_rule_and_seed() -> None:
    request = Request((0,), SAMPLED, verification=Verification("stable"))
    assert Verifier.of(request, 3).name.startswith("seed-stable")
    again, other = (Verifier.of(request, seed).drawing(0) for seed in (3, 4))
    first = Verifier.of(request, 3).drawing(0)
    assert first is not None and again is not None and other is not None
    flat = dense([1.0] * 50)
    assert [first(flat, i) for i in range(9)] == [again(flat, i) for i in range(9)]
    assert [first(flat, i) for i in range(9)] != [other(flat, i) for i in range(9)]
