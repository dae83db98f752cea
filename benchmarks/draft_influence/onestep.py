"""What one step emits when a draft offers one token, worked out exactly: every offer, kept or replaced.

No text is drawn. At a position with the target's distribution p and the draft's q, an offered token x has
the probability q(x), is accepted with the probability that the rule gives it, and is else replaced by a draw
from the rule's residual; added up over the vocabulary that is the distribution of the token that comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.core.data import Distribution, Draft, point_mass
from outrider.sampling import probability
from outrider.verify.rules import accept_probability, block_weights, residual, verify_lenient


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over one offered token, by its two functions; those of the package are what is measured.

    `accept(p, q, token, lenience)`: the probability that the token is accepted; `replace(p, q, lenience)`:
    what is drawn in its place.
    """

    name: str
    accept: Callable[[Distribution, Distribution, int, float], float]
    replace: Callable[[Distribution, Distribution, float], Distribution]


def _residual(target: Distribution, draft: Distribution, lenience: float) -> Distribution:
    return residual(target, draft, lenience=lenience)


def _block_accept(target: Distribution, draft: Distribution, token: int, lenience: float) -> float:
    assert lenience == 1, "the block rule knows no lenience"
    offered = Draft((token,), (draft,), (0.5,), ("draft",))
    _, chances = block_weights([target, target], offered)
    return chances[0] if chances else 0.0


TOKEN = Rule("token", accept_probability, _residual)
BLOCK = Rule("block", _block_accept, _residual)


@dataclass(frozen=True, slots=True)
class Step:
    """The distribution of the token that comes out, and the probability that the draft's stood."""

    emitted: Distribution
    acceptance: float


def one_step(target: Distribution, draft: Distribution, lenience: float = 1.0, rule: Rule = TOKEN) -> Step:
    """One step under a rule; a `draft` that is a point mass offers its token as certain."""
    tokens = np.union1d(target.tokens, draft.tokens)
    emitted = np.zeros(len(tokens))
    accepted = 0.0
    for token, chance in zip(draft.tokens.tolist(), draft.probs.tolist(), strict=True):
        kept = chance * rule.accept(target, draft, token, lenience)
        emitted[np.searchsorted(tokens, token)] += kept
        accepted += kept
    rejected = float(draft.probs.sum()) - accepted
    if rejected > 0:
        drawn = rule.replace(target, draft, lenience)
        emitted[np.searchsorted(tokens, drawn.tokens)] += rejected * drawn.probs
    return Step(Distribution(tokens, emitted), accepted)


def greedy_step(row: np.ndarray, offered: int, lenience: float) -> Step:
    """A greedy step over a row of logits: the offered token, or the most likely. Without lenience the rule
    over certain tokens decides."""
    best = point_mass(int(row.argmax()))
    if lenience == 1:
        return one_step(best, point_mass(offered))

    def ratio(_index: int, token: int) -> float:
        return float(np.exp(float(row[token]) - float(row.max())))

    verdict = verify_lenient(ratio, (best, best), Draft((offered,), None, (0.5,), ("draft",)), lenience)
    return Step(point_mass(offered) if verdict.num_accepted else best, float(verdict.num_accepted))


def total_variation(first: Distribution, second: Distribution) -> float:
    """Half the sum of all differences: the greatest difference that any event can have."""
    tokens = np.union1d(first.tokens, second.tokens)
    difference = np.zeros(len(tokens))
    difference[np.searchsorted(tokens, first.tokens)] += first.probs
    difference[np.searchsorted(tokens, second.tokens)] -= second.probs
    return float(np.abs(difference).sum()) / 2


def mass(distribution: Distribution, token: int) -> float:
    return probability(distribution, token)
