"""The rule by exact enumeration: every drafted path, every acceptance and every draw, weighed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.data import Distribution, Draft, Verdict
from outrider.sampling import point_mass, probability
from outrider.verify import accept_probability, residual, verify

Probs = npt.NDArray[np.float64]
Rule = Callable[[Sequence[Distribution], Draft, np.random.Generator], Verdict]
Language = Callable[[tuple[int, ...]], Probs]
"""The probabilities of the next token after a context."""


def offer(tokens: Sequence[int], probs: Sequence[Distribution] | None = None) -> Draft:
    n = len(tokens)
    return Draft(tuple(tokens), None if probs is None else tuple(probs), (0.5,) * n, ("test",) * n)


def dense(probs: Probs) -> Distribution:
    tokens = np.flatnonzero(probs > 0)
    return Distribution(tokens.astype(np.int64), probs[tokens] / probs[tokens].sum())


class _Split(Exception):
    """The rule asked for a uniform that the script does not hold; the answers it could matter to."""


class Scripted:
    """A generator that plays a script of uniforms and asks to be told more when it ends."""

    def __init__(self, script: Sequence[float]) -> None:
        self._left = list(script)

    def random(self) -> float:
        if not self._left:
            raise _Split
        return self._left.pop(0)


def outcomes(
    rule: Rule, target: Sequence[Distribution], draft: Draft, edges: Sequence[float]
) -> Iterator[tuple[Verdict, float]]:
    """Every verdict that `rule` can reach, with its probability.

    `edges` are all thresholds that a uniform is compared with anywhere: between two neighbours
    the rule cannot tell one uniform from another, so one of each interval is tried.
    """
    middles = [((a + b) / 2, b - a) for a, b in pairwise(edges)]
    stack: list[tuple[tuple[float, ...], float]] = [((), 1.0)]
    while stack:
        script, weight = stack.pop()
        try:
            verdict = rule(target, draft, cast(np.random.Generator, Scripted(script)))
        except _Split:
            stack += [((*script, middle), weight * width) for middle, width in middles]
        else:
            yield verdict, weight


def thresholds(target: Sequence[Distribution], draft: Draft) -> list[float]:
    """0, 1, every acceptance, and every cumulative probability that a draw may invert."""
    found = {0.0, 1.0}
    for p in target:
        found |= set(np.cumsum(p.probs).tolist())
    for i, token in enumerate(draft.tokens):
        q = point_mass(token) if draft.probs is None else draft.probs[i]
        pq, rest = probability(target[i], token), residual(target[i], q)
        found |= {
            accept_probability(target[i], q, token),
            pq,
            min(1.0, probability(q, token) / pq if pq else 1),
        }
        found |= set(np.cumsum(rest.probs).tolist())
    return sorted(x for x in found if x <= 1)


def drafts(q: Language, size: int, length: int, sampled: bool) -> Iterator[tuple[Draft, float]]:
    """Every draft of this length with the probability of being drawn from `q`, or the greedy one."""
    paths: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(length):
        if sampled:
            paths = [
                ((*path, t), w * float(q(path)[t]))
                for path, w in paths
                for t in range(size)
                if q(path)[t] > 0
            ]
        else:
            paths = [((*path, int(np.argmax(q(path)))), w) for path, w in paths]
    for path, weight in paths:
        probs = tuple(dense(q(path[:i])) for i in range(length)) if sampled else None
        yield offer(path, probs), weight


def text_distribution(
    p: Language, tokens: tuple[int, ...], size: int, length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts of `length` that begin with `tokens`, finished by plain decoding."""
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    for token in range(size):
        if (share := float(p(tokens)[token])) > 0:
            for text, weight in text_distribution(p, (*tokens, token), size, length):
                yield text, share * weight


def emitted_distance(rule: Rule, p: Language, q: Language, size: int, length: int, *, sampled: bool) -> float:
    """Total variation between the texts of one round under `rule`, finished by plain decoding
    to length + 1, and the texts of plain decoding."""
    plain = dict(text_distribution(p, (), size, length + 1))
    emitted: dict[tuple[int, ...], float] = {}
    for draft, weight in drafts(q, size, length, sampled):
        target = [dense(p(draft.tokens[:i])) for i in range(length + 1)]
        for verdict, chance in outcomes(rule, target, draft, thresholds(target, draft)):
            tokens = (*draft.tokens[: verdict.num_accepted], verdict.token)
            for text, share in text_distribution(p, tokens, size, length + 1):
                emitted[text] = emitted.get(text, 0.0) + weight * chance * share
    assert abs(sum(emitted.values()) - 1) < 1e-12
    return sum(abs(emitted.get(t, 0.0) - plain.get(t, 0.0)) for t in emitted.keys() | plain.keys()) / 2


def language(size: int, seed: int, kind: str = "dense") -> Language:
    """Random probabilities that depend on the whole context."""

    def probs(context: tuple[int, ...]) -> Probs:
        key = hashlib.blake2b(repr((seed, context)).encode(), digest_size=8).digest()
        weights = np.random.default_rng(int.from_bytes(key)).dirichlet(np.ones(size))
        if kind == "one-hot":
            weights = (weights == weights.max()).astype(float)
        elif kind == "zeros":
            weights[np.argmin(weights)] = 0
        elif kind == "ties":
            weights = np.round(weights * 4) + (weights == weights.max())
        return cast(Probs, weights / weights.sum())

    return probs


CASES = [(3, 1), (3, 2), (4, 2), (3, 3)]


@pytest.mark.parametrize(("size", "length"), CASES)
@pytest.mark.parametrize("kind", ["dense", "one-hot", "zeros", "ties"])
@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_emitted_is_distributed_as_plain_decoding(
    size: int, length: int, kind: str, sampled: bool
) -> None:
    p, q = language(size, 1, kind), language(size, 2, "zeros" if kind == "zeros" else "dense")
    assert emitted_distance(verify, p, q, size, length, sampled=sampled) <= 1e-12


def test_a_draft_that_is_the_target_is_kept_whole() -> None:
    p = language(3, 1)
    for draft, _ in drafts(p, 3, 2, True):
        target = [dense(p(draft.tokens[:i])) for i in range(3)]
        verdicts = [v for v, w in outcomes(verify, target, draft, thresholds(target, draft)) if w]
        assert {v.num_accepted for v in verdicts} == {2} and {v.kind for v in verdicts} == {"bonus"}


@pytest.mark.parametrize("n", [0, 1, 4])
def test_greedy_against_greedy_is_exact_match_without_a_uniform(n: int) -> None:
    rng = cast(np.random.Generator, Scripted([]))
    target = [point_mass(i % 3) for i in range(5)]
    tokens = tuple(i % 3 if i < n else 9 for i in range(4))
    kind = "bonus" if n == 4 else "recovered"
    assert verify(target, offer(tokens), rng) == Verdict(n, n % 3, kind)  # type: ignore[arg-type]
    assert verify(target, Draft(), rng) == Verdict(0, 0, "bonus")


# Rules that are wrong, in the ways that have been seen: the enumeration must notice


def broken(
    accept: Callable[[Distribution, Distribution, int], float] = accept_probability,
    rest: Callable[[Distribution, Distribution], Distribution] = residual,
    *,
    keep: int = 0,
) -> Rule:
    """The rule with other parts; `keep` 1 keeps the rejected token."""

    def rule(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
        for i, token in enumerate(draft.tokens):
            q = point_mass(token) if draft.probs is None else draft.probs[i]
            chance = accept(target[i], q, token)
            if chance < 1 and (chance == 0 or rng.random() >= chance):
                return Verdict(i + keep, _draw(rest(target[i], q), rng), "recovered")
        return Verdict(len(draft), _draw(target[len(draft)], rng), "bonus")

    return rule


def _draw(p: Distribution, rng: np.random.Generator) -> int:
    if len(p.tokens) == 1:
        return int(p.tokens[0])
    at = int(np.searchsorted(np.cumsum(p.probs), rng.random(), side="right"))
    return int(p.tokens[min(at, len(p.tokens) - 1)])


def test_the_unbroken_rule_passes() -> None:
    assert emitted_distance(broken(), language(3, 1), language(3, 2), 3, 2, sampled=True) <= 1e-12


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(broken(rest=lambda p, _q: p), id="no residual"),
        pytest.param(broken(accept=lambda p, q, t: accept_probability(q, p, t)), id="p and q swapped"),
        pytest.param(broken(keep=1), id="the rejected token is kept"),
        pytest.param(broken(accept=lambda *_: 1.0), id="all is accepted"),
    ],
)
def test_a_broken_rule_is_noticed(rule: Rule) -> None:
    assert emitted_distance(rule, language(3, 1), language(3, 2), 3, 2, sampled=True) > 0.01


def test_a_greedy_draft_that_claims_to_be_sampled_is_noticed() -> None:
    p, q = language(3, 1), language(3, 2)

    def claims_softmax(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
        probs = tuple(dense(q(draft.tokens[:i])) for i in range(len(draft)))
        return verify(target, offer(draft.tokens, probs), rng)

    assert emitted_distance(claims_softmax, p, q, 3, 2, sampled=False) > 0.01


# Properties of the parts


WEIGHTS = st.lists(
    st.sampled_from([0.0, 1e-300, 1e-12, 0.25, 0.25 + 1e-16, 0.5, 1.0]), min_size=4, max_size=4
)


@given(p=WEIGHTS.filter(any), q=WEIGHTS.filter(any))
def test_acceptance_and_residual_add_up_to_the_target(p: list[float], q: list[float]) -> None:
    target, draft = dense(np.array(p)), dense(np.array(q))
    total = np.zeros(4)
    rejected = 0.0
    for token, chance in zip(draft.tokens.tolist(), draft.probs.tolist(), strict=True):
        accept = accept_probability(target, draft, token)
        assert 0 <= accept <= 1
        total[token] += chance * accept
        rejected += chance * (1 - accept)
    rest = residual(target, draft)
    assert rest.probs.min() > 0 and abs(rest.probs.sum() - 1) < 1e-12 and (np.diff(rest.tokens) > 0).all()
    assert set(rest.tokens.tolist()) <= set(target.tokens.tolist())
    total[rest.tokens] += rejected * rest.probs
    assert np.abs(total - [probability(target, t) for t in range(4)]).max() < 1e-12


@given(weights=WEIGHTS.filter(any))
def test_equal_distributions_leave_the_target(weights: list[float]) -> None:
    p = dense(np.array(weights))
    assert residual(p, p) is p
    assert all(accept_probability(p, p, t) == 1 for t in p.tokens.tolist())


def test_disjoint_supports_reject_and_leave_the_target() -> None:
    p, q = dense(np.array([0.5, 0.5, 0, 0])), dense(np.array([0, 0, 0.5, 0.5]))
    assert accept_probability(p, q, 2) == 0
    assert residual(p, q).probs.tolist() == [0.5, 0.5]


def test_a_token_that_the_target_rules_out_never_stands() -> None:
    p, q = dense(np.array([1.0, 1.0, 0, 0])), dense(np.array([1.0, 0, 1.0, 0]))
    assert accept_probability(p, q, 3) == 0  # nor does the draft give it any chance
    rng = np.random.default_rng(0)
    assert {verify([p, p], offer((3,), (q,)), rng).num_accepted for _ in range(20)} == {0}
