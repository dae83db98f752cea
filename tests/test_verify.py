"""The rules: properties of their parts, one request's choice, and all that they can lead to, enumerated;
mistakes that others have made would be noticed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import VOCABULARY, sampler
from exactness import (
    Branching,
    Drawn,
    Enumerated,
    Rng,
    Text,
    bias,
    certain,
    dense,
    distance,
    expected_accepted,
    explore,
    language,
    most_likely,
    offer,
    texts_of,
    verdicts,
)
from exactness import (
    Rule as RuleFunction,
)
from outrider.backends.fake import FakeVocabulary
from outrider.core.data import Distribution, Draft, DraftToken, Request, Verdict
from outrider.core.errors import SettingError
from outrider.core.params import DraftSampling, Rule, SamplingParams, Verification
from outrider.sampling import LazyDistributions, RequestSampler, draw, point_mass, probability
from outrider.verify import Verifier
from outrider.verify.rules import (
    accept_probability,
    block_accept,
    block_ratios,
    excess,
    pick,
    residual,
    uniforms,
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


@pytest.mark.parametrize("settings", [{"rule": "none"}, {"draft_sampling": "some"}])
def test_what_verification_does_not_know_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        Verification(**settings)


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
    request = Request((0,), SAMPLED, verification=Verification(rule, "sampled"))

    def asked(target: Sequence[Distribution], draft: Draft, rng: Rng) -> Verdict:
        return Enumerated(request, rng).verify(cast(LazyDistributions, target), draft, 0)

    kept = expected_accepted(asked, p, Drawn(q, 2))
    own, other = (verify_tokens, verify_block) if rule == "token" else (verify_block, verify_tokens)
    assert kept == pytest.approx(expected_accepted(own, p, Drawn(q, 2)), abs=1e-12)
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


# Seed-stable verification

NUM_SEEDS = 3000


def picks(p: Distribution, position: int = 0, num: int = NUM_SEEDS) -> np.ndarray:
    return np.array([pick(p, seed, position) for seed in range(num)])


def test_what_is_picked_follows_the_distribution() -> None:
    """Over the seeds of one position, and over the positions of one seed."""
    p = language(4, 1)(())
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


@pytest.mark.parametrize("pair", range(2))
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


def test_a_verdict_uses_the_noise_of_its_place_in_the_text() -> None:
    sampler = RequestSampler(SamplingParams(temperature=1.0), FakeVocabulary("abc"), ())
    rows = LazyDistributions(np.zeros((1, 4), dtype=np.float32), sampler, ())
    verifier = Verifier(Verification("stable"), 3, greedy=False)
    found = [verifier.verify(rows, Draft(), position).token for position in range(20)]
    assert found == [pick(rows[0], 3, position) for position in range(20)]
    assert len(set(found)) > 1


# By exact enumeration: what comes out is distributed as by plain decoding

RULES = [pytest.param(verify_tokens, id="token"), pytest.param(verify_block, id="block")]
CASES = [(2, 3), (3, 1), (3, 2), (4, 2), (3, 3)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "length"), CASES)
@pytest.mark.parametrize("kind", ["dense", "one-hot", "zeros", "ties"])
def test_drawn_drafts_leave_the_text_as_it_is(rule: RuleFunction, size: int, length: int, kind: str) -> None:
    p, q = language(size, 1, kind), language(size, 2, "zeros" if kind == "zeros" else "dense")
    assert bias(rule, p, Drawn(q, length), length) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["dense", "one-hot", "zeros", "ties"])
def test_certain_drafts_leave_the_text_as_it_is(rule: RuleFunction, kind: str) -> None:
    p = language(3, 1, kind)
    assert bias(rule, p, most_likely(language(3, 2), 3), 3) <= 1e-12
    for tokens in [(), (0,), (2, 1), (0, 0, 0), (1, 2, 0)]:
        assert bias(rule, p, certain(*tokens), 3) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_may_end_where_its_first_tokens_say_so(rule: RuleFunction, seed: int) -> None:
    """As one does that grows while it is sure, or ends after an end token."""
    p, q = language(3, seed), language(3, seed + 50)
    for stops in (
        lambda tokens: float(q(tokens).max()) < 0.6,
        lambda tokens: bool(tokens) and tokens[-1] == 2,
        lambda tokens: len(tokens) == 2 and sum(tokens) % 2 == 0,
        lambda tokens: len(tokens) >= 1 and tokens[0] != 1,
    ):
        assert bias(rule, p, Drawn(q, 3, stops), 3) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_cut_for_its_last_token_biases_the_text(rule: RuleFunction) -> None:
    """Why policies must not look at drawn tokens: here the last one goes where it is a 0."""
    p, q = language(3, 1), language(3, 2)

    def cut(rng: Rng) -> Draft:
        draft = Drawn(q, 2)(rng)
        assert draft.probs is not None
        keep = 1 if draft.tokens[-1] == 0 else 2
        return offer(draft.tokens[:keep], draft.probs[:keep])

    assert bias(rule, p, cut, 2) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_one_of_several_drafters_may_be_chosen_by_what_was_known(rule: RuleFunction) -> None:
    """A coin, a lookup and a drawn draft in turn: each is right, so their mixture is."""
    p, q = language(3, 1), language(3, 2)

    def mixed(rng: Rng) -> Draft:
        if rng.random() < 0.3:
            return offer((1, 1))
        return Drawn(q, 2)(rng) if rng.random() < 0.5 else offer(())

    assert bias(rule, p, mixed, 2) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_the_target_is_kept_whole(rule: RuleFunction) -> None:
    p = language(3, 1)

    def run(rng: Rng) -> Verdict:
        draft = Drawn(p, 2)(rng)
        return rule([dense(p(draft.tokens[:i])) for i in range(3)], draft, rng)

    assert {(v.num_accepted, v.kind) for v, weight in explore(run) if weight} == {(2, "bonus")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["dense", "zeros", "ties"])
def test_no_random_number_serves_twice(rule: RuleFunction, kind: str) -> None:
    p, q = language(3, 1, kind), language(3, 2)
    worlds: list[Branching] = []

    def run(rng: Rng) -> Verdict:
        assert isinstance(rng, Branching)
        worlds.append(rng)
        draft = Drawn(q, 3)(rng)
        num_drawn = len(rng.uniforms)
        verdict = rule([dense(p(draft.tokens[:i])) for i in range(4)], draft, rng)
        # One for each decision that was open, one for the token that was drawn.
        assert len(rng.uniforms) - num_drawn <= len(draft) + 1
        return verdict

    assert len(list(explore(run))) > 50
    assert {uniform.num_uses for world in worlds for uniform in world.uniforms} == {1}


# Expected tokens


def test_block_verification_never_keeps_fewer_tokens() -> None:
    gains = []
    for seed in range(12):
        size, length = (2, 3) if seed % 2 else (3, 2)
        p, q = language(size, seed), language(size, seed + 100, "zeros" if seed % 3 == 0 else "dense")
        offers = Drawn(q, length)
        gains.append(expected_accepted(verify_block, p, offers) - expected_accepted(verify_tokens, p, offers))
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def test_both_rules_keep_as_much_of_one_token_and_of_certain_drafts() -> None:
    p, q = language(3, 1), language(3, 2)
    for offers in (Drawn(q, 1), most_likely(q, 3), most_likely(p, 3)):
        block, token = (expected_accepted(rule, p, offers) for rule in (verify_block, verify_tokens))
        assert block == pytest.approx(token, abs=1e-12) and token > 0


def test_one_drawn_token_stands_as_often_as_the_distributions_overlap() -> None:
    p, q = language(4, 1), language(4, 2)
    overlap = float(np.minimum(p(()), q(())).sum())
    assert expected_accepted(verify_tokens, p, Drawn(q, 1)) == pytest.approx(overlap, abs=1e-12)


# Broken rules, which the enumeration must notice


def token_rule(
    accept: Callable[[Distribution, Distribution, int], float] = accept_probability,
    rest: Callable[[Distribution, Distribution], Distribution] = residual,
    keep: int = 0,
    one_number: bool = False,
) -> RuleFunction:
    """Token-wise rejection, with parts that can be exchanged."""

    def rule(target: Sequence[Distribution], draft: Draft, rng: Rng) -> Verdict:
        number = rng.random()
        for i, token in enumerate(draft.tokens):
            q = point_mass(token) if draft.probs is None else draft.probs[i]
            chance = accept(target[i], q, token)
            if (number if one_number else rng.random()) >= chance:
                return Verdict(i + keep, draw(rest(target[i], q), rng), "recovered")
        return Verdict(len(draft), draw(target[len(draft)], rng), "bonus")

    return rule


def block_rule(
    last: str = "joint", *, scaled: bool = True, capped: bool = True, forward: bool = False
) -> RuleFunction:
    """Block verification, with parts that can be exchanged."""

    def rule(target: Sequence[Distribution], draft: Draft, rng: Rng) -> Verdict:
        assert draft.probs is not None
        ratios = block_ratios(target, draft.tokens, draft.probs)
        chances = [block_accept(target, draft.probs, ratios, i) for i in range(1, len(ratios))]
        own = [probability(target[i], x) / probability(draft.probs[i], x) for i, x in enumerate(draft.tokens)]
        if not capped:
            ratios = [1.0, *np.cumprod(own).tolist()]
        if len(chances) == len(draft) and last != "joint":
            chances[-1] = {"alone": min(1.0, own[-1]), "missing": 0.0, "everywhere": ratios[-1]}[last]
        if last == "everywhere":
            chances = ratios[1:]
        kept = (longest_run if forward else longest_prefix)(chances, rng)
        if kept == len(draft):
            return Verdict(kept, draw(target[kept], rng), "bonus")
        rest = residual(target[kept], draft.probs[kept], ratios[kept] if scaled else 1.0)
        return Verdict(kept, draw(rest, rng), "recovered")

    return rule


def longest_prefix(chances: Sequence[float], rng: Rng) -> int:
    return next((i for i in range(len(chances), 0, -1) if rng.random() < chances[i - 1]), 0)


def longest_run(chances: Sequence[float], rng: Rng) -> int:
    return next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))


def biases(rule: RuleFunction) -> Iterator[float]:
    return (bias(rule, language(3, seed), Drawn(language(3, seed + 1), 3), 3) for seed in range(1, 9))


def test_the_unbroken_copies_pass() -> None:
    assert max(biases(token_rule())) <= 1e-12
    assert max(biases(block_rule())) <= 1e-12


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(token_rule(rest=lambda p, _q: p), id="no residual"),
        pytest.param(token_rule(accept=lambda p, q, t: accept_probability(q, p, t)), id="p and q swapped"),
        pytest.param(token_rule(keep=1), id="the rejected token is kept"),
        pytest.param(token_rule(accept=lambda *_: 1.0), id="all is accepted"),
        pytest.param(token_rule(one_number=True), id="one random number for all decisions"),
        pytest.param(block_rule("alone"), id="block: the last token judged by itself"),
        pytest.param(block_rule("missing"), id="block: the last token is never accepted"),
        pytest.param(block_rule("everywhere"), id="block: every position judged as the last"),
        pytest.param(block_rule(scaled=False), id="block: the residual without the ratio"),
        pytest.param(block_rule(capped=False), id="block: the ratio is not capped"),
        pytest.param(block_rule(forward=True), id="block: from the first token on"),
    ],
)
def test_a_broken_rule_is_noticed(rule: RuleFunction) -> None:
    assert any(found > 0.01 for found in biases(rule))


@pytest.mark.parametrize("rule", RULES)
def test_a_likeliest_draft_that_claims_to_be_drawn_is_noticed(rule: RuleFunction) -> None:
    p, q = language(3, 1), language(3, 2)
    tokens = most_likely(q, 2)(np.random.default_rng()).tokens
    claims = offer(tokens, [dense(q(tokens[:i])) for i in range(2)])
    assert bias(rule, p, lambda _rng: claims, 2) > 0.01


def test_a_random_number_that_drew_the_draft_must_not_judge_it() -> None:
    """The stand-in keeps what is known of a number, so using it again shows."""
    p, q = language(3, 1), language(3, 2)

    class Echo:
        """Hands out the same number each time."""

        def __init__(self, rng: Rng) -> None:
            self._number = rng.random()

        def random(self) -> float:
            return self._number

    def run(rng: Rng) -> Text:
        echo = cast(Rng, Echo(rng))
        draft = Drawn(q, 1)(echo)
        verdict = verify_tokens([dense(p(())), dense(p(draft.tokens))], draft, echo)
        assert verdict.token is not None
        return (*draft.tokens[: verdict.num_accepted], verdict.token)[:1]

    plain: dict[Text, float] = {(token,): float(share) for token, share in enumerate(p(()))}
    assert distance(texts_of(run), plain) > 0.01
