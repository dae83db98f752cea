"""The drafted tokens of one target call, allocated among the sequences that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.policy.objective import Array, best_length


@dataclass(frozen=True, slots=True)
class Allocatable:
    """What one sequence could draft: each token's acceptance given that all before it are accepted. The first
    `num_fixed` are drafted in any case."""

    acceptance: Sequence[float]
    num_fixed: int = 0


def allocate(candidates: Sequence[Allocatable], calls_s: Array, reward_s: float) -> list[int]:
    """How many tokens of each candidate to draft; `calls_s[n]` is the call with n drafted tokens in all.

    A token's marginal reward is λ times its prefix acceptance probability, which falls along a candidate: the
    best call with n tokens takes the n most likely of all candidates, and the best n is tried out. A
    candidate that has the call to itself is also weighed against the steps to come (`best_length`).
    """
    if len(candidates) == 1:
        [alone] = candidates
        return [best_length(alone.acceptance, calls_s, reward_s, alone.num_fixed)[0]]
    lengths = [candidate.num_fixed for candidate in candidates]
    probs = [np.cumprod(np.asarray(each.acceptance, dtype=np.float64)) for each in candidates]
    tokens = sorted((-p, i) for i, each in enumerate(candidates) for p in probs[i][each.num_fixed :])
    rewards = np.cumsum([0.0, *(-negative for negative, _ in tokens)]) * reward_s
    costs = calls_s[sum(lengths) :][: len(rewards)]
    best = int((rewards[: len(costs)] - costs).argmax())
    for _, i in tokens[:best]:
        lengths[i] += 1
    return lengths
