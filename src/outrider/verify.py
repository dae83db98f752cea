"""Which drafted tokens the target keeps: rejection sampling, as pure functions.

Leviathan et al. 2023 (2211.17192), algorithm 1, and Chen et al. 2023 (2302.01318), algorithm 2:
a token x drawn from the draft's distribution q stands with probability min(1, p(x)/q(x)), where
p is the target's; after the first rejection the next token is drawn from norm(max(0, p - q)), and
after a draft that stands whole from the target's distribution behind it. The tokens that come out
are distributed exactly as if each had been drawn from p.

A draft without distributions is certain of its tokens (q is a point mass), and a greedy target is
certain of its own, so greedy decoding and lookup are the same rule and need no path of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.data import Distribution, Draft, Verdict
from outrider.sampling import draw, point_mass, probability


def accept_probability(target: Distribution, draft: Distribution, token: int) -> float:
    """The probability that `token`, drawn from `draft`, stands: min(1, p/q).

    0 where p is 0, whatever the draft claims: a token that the target rules out never stands.
    """
    p = probability(target, token)
    q = probability(draft, token)
    if p == 0:
        return 0.0
    return 1.0 if p >= q else p / q


def residual(target: Distribution, draft: Distribution) -> Distribution:
    """What is left of the target after a rejection: norm(max(0, p - q)).

    Where nothing is left (p equals q up to rounding) a rejection has probability 0; the target
    itself is returned, so that the rule stays total.
    """
    q = np.zeros(len(target.tokens))
    _, at_target, at_draft = np.intersect1d(
        target.tokens, draft.tokens, assume_unique=True, return_indices=True
    )
    q[at_target] = draft.probs[at_draft]
    rest = np.maximum(target.probs - q, 0.0)
    total = rest.sum()
    if total <= 0:
        return target
    kept = rest > 0
    return Distribution(target.tokens[kept], rest[kept] / total)


def verify(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
    """Apply the rule to a draft of n tokens, given the target's n + 1 distributions.

    Each uniform is used once: one for a decision that is not certain, one for a token that is
    drawn from more than one candidate.
    """
    for i, token in enumerate(draft.tokens):
        p = target[i]
        q = point_mass(token) if draft.probs is None else draft.probs[i]
        accept = accept_probability(p, q, token)
        if accept < 1 and (accept == 0 or rng.random() >= accept):
            return Verdict(i, draw(residual(p, q), rng), "recovered")
    return Verdict(len(draft), draw(target[len(draft)], rng), "bonus")
