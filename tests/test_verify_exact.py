"""The rules by exact enumeration: what comes out is distributed as by plain decoding, and the
mistakes that others have made would be noticed."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from exactness import (
    Branching,
    Drawn,
    Rng,
    Rule,
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
)
from outrider.core.data import Distribution, Draft, Verdict
from outrider.sampling import draw, point_mass, probability
from outrider.verify.rules import (
    accept_probability,
    block_accept,
    block_ratios,
    residual,
    verify_block,
    verify_tokens,
)

RULES = [pytest.param(verify_tokens, id="token"), pytest.param(verify_block, id="block")]
CASES = [(2, 3), (3, 1), (3, 2), (4, 2), (3, 3)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "length"), CASES)
@pytest.mark.parametrize("kind", ["dense", "one-hot", "zeros", "ties"])
def test_drawn_drafts_leave_the_text_as_it_is(rule: Rule, size: int, length: int, kind: str) -> None:
    p, q = language(size, 1, kind), language(size, 2, "zeros" if kind == "zeros" else "dense")
    assert bias(rule, p, Drawn(q, length), length) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["dense", "one-hot", "zeros", "ties"])
def test_certain_drafts_leave_the_text_as_it_is(rule: Rule, kind: str) -> None:
    p = language(3, 1, kind)
    assert bias(rule, p, most_likely(language(3, 2), 3), 3) <= 1e-12
    for tokens in [(), (0,), (2, 1), (0, 0, 0), (1, 2, 0)]:
        assert bias(rule, p, certain(*tokens), 3) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_may_end_where_its_first_tokens_say_so(rule: Rule, seed: int) -> None:
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
def test_a_draft_that_is_cut_for_its_last_token_biases_the_text(rule: Rule) -> None:
    """Why policies must not look at drawn tokens: here the last one goes where it is a 0."""
    p, q = language(3, 1), language(3, 2)

    def cut(rng: Rng) -> Draft:
        draft = Drawn(q, 2)(rng)
        assert draft.probs is not None
        keep = 1 if draft.tokens[-1] == 0 else 2
        return offer(draft.tokens[:keep], draft.probs[:keep])

    assert bias(rule, p, cut, 2) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_one_of_several_drafters_may_be_chosen_by_what_was_known(rule: Rule) -> None:
    """A coin, a lookup and a drawn draft in turn: each is right, so their mixture is."""
    p, q = language(3, 1), language(3, 2)

    def mixed(rng: Rng) -> Draft:
        if rng.random() < 0.3:
            return offer((1, 1))
        return Drawn(q, 2)(rng) if rng.random() < 0.5 else offer(())

    assert bias(rule, p, mixed, 2) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_the_target_is_kept_whole(rule: Rule) -> None:
    p = language(3, 1)

    def run(rng: Rng) -> Verdict:
        draft = Drawn(p, 2)(rng)
        return rule([dense(p(draft.tokens[:i])) for i in range(3)], draft, rng)

    assert {(v.num_accepted, v.kind) for v, weight in explore(run) if weight} == {(2, "bonus")}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["dense", "zeros", "ties"])
def test_no_random_number_serves_twice(rule: Rule, kind: str) -> None:
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
) -> Rule:
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
) -> Rule:
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


def most_biased(rule: Rule) -> float:
    return max(bias(rule, language(3, seed), Drawn(language(3, seed + 1), 3), 3) for seed in range(1, 9))


def test_the_unbroken_copies_pass() -> None:
    assert most_biased(token_rule()) <= 1e-12
    assert most_biased(block_rule()) <= 1e-12


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
def test_a_broken_rule_is_noticed(rule: Rule) -> None:
    assert most_biased(rule) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_a_likeliest_draft_that_claims_to_be_drawn_is_noticed(rule: Rule) -> None:
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
