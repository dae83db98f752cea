"""The tokens of one target call, shared out among the drafts of all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.policy.growth import CAUTION, Array, best_length

__all__ = ["Offered", "share_out"]


@dataclass(frozen=True, slots=True)
class Offered:
    """What one sequence could draft: the chance of each token that it stands if all before it do. The
    first `fixed` are drafted in any case."""

    chances: Sequence[float]
    fixed: int = 0


def share_out(chains: Sequence[Offered], calls_s: Array, token_s: float) -> list[int]:
    """How many tokens of each chain are worth drafting.

    `calls_s[n]` is the call with n drafted tokens in all, `token_s` what an emitted token is worth. What
    a token brings is the probability that it is reached and stands, which along a chain only falls: the
    best call over n tokens takes the n most likely of all chains, and the best n is tried out. A chain that
    has the call to itself is cut where that is best for the steps to come as well.
    """
    if len(chains) == 1:
        [chain] = chains
        return [best_length(chain.chances, calls_s, token_s, chain.fixed)[0]]
    lengths = [chain.fixed for chain in chains]
    survivals = [np.cumprod(np.asarray(chain.chances, dtype=np.float64)) for chain in chains]
    open_ = [(-s, i) for i, chain in enumerate(chains) for s in survivals[i][chain.fixed :]]
    open_.sort()
    gains = np.cumsum([0.0, *(-negative for negative, _ in open_)]) * token_s
    paid_s = calls_s[sum(lengths) :][: len(gains)]
    best = int((gains[: len(paid_s)] - (1 + CAUTION) * paid_s).argmax())
    for _, i in open_[:best]:
        lengths[i] += 1
    return lengths
