"""What lookups and constraints offer together, and what learning compares with what became of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, TokenEstimate
from outrider.policy.estimates import Estimator, RequestBias
from outrider.policy.forced import FORCED, forced, permitted
from outrider.policy.state import PolicyState, RequestState


@dataclass(slots=True)
class DraftQuery:
    """What a draft model was asked in a step, and what it said."""

    model: str
    lookup_prefix: tuple[int, ...]
    """lookup tokens before its own"""
    is_exploring: bool
    """whether it was asked only to learn how good it is"""
    offer: Draft = field(default_factory=Draft)
    acceptance: list[float] = field(default_factory=list)
    """of every token it found, whether or not it was taken"""
    averages: list[float] = field(default_factory=list)
    """the moving average of confidence before each of these"""


@dataclass(slots=True)
class Proposal:
    """What one request's step was offered, for learning to compare with what became of it."""

    lookup: Draft = field(default_factory=Draft)
    """what the model-free drafters offered"""
    is_constrained: bool = False
    query: DraftQuery | None = None


def look_up(
    state: PolicyState,
    text: RequestState,
    lookups: Sequence[Drafter],
    request: DraftRequest,
    prefix: tuple[int, ...],
    limit: int,
) -> Draft:
    """What the model-free drafters together say follows `prefix`: the offer with the most expected tokens,
    and what another goes on with after it. What a constraint forces comes before every offer and after it."""
    request = DraftRequest(
        request.sequence,
        limit,
        request.sampler,
        prefix=prefix,
        constraint=request.constraint,
        drafting=request.drafting,
    )
    found, left = _forced(Draft(), state, text, request), list(lookups)
    least = state.marginal_costs(text.context).min_useful_prob
    while left and len(found) < limit and (prefix_prob := math.prod(found.acceptance)) >= least:
        best, most_expected = None, 0.0
        asked = request
        if found:
            asked = replace(request, prefix=(*prefix, *found.tokens), max_tokens=limit - len(found))
        for drafter in left:
            estimator = state.estimator(drafter.name, constrained=request.constraint is not None)
            collected = _UsefulTokens(estimator, text.bias(drafter.name), prefix_prob, least)
            [draft], _ = drafter.propose([asked], collected)
            draft = permitted(asked, draft)
            acceptance = collected.acceptance[: len(draft)]
            expected = sum(accumulate(acceptance, mul))
            if expected > most_expected:
                best, most_expected = (drafter, draft, acceptance), expected
        if best is None:
            break
        drafter, draft, acceptance = best
        left.remove(drafter)
        found += Draft(draft.tokens, None, tuple(acceptance), draft.sources, estimates=draft.estimates)
        found = _forced(found, state, text, request)
    return found


def _forced(found: Draft, state: PolicyState, text: RequestState, request: DraftRequest) -> Draft:
    """Followed by what the constraint forces after it."""
    if request.constraint is None:
        return found
    draft = forced(request, found.tokens)
    estimator, bias = state.estimator(FORCED, constrained=True), text.bias(FORCED)
    acceptance = tuple(estimator.probability(estimate, bias) for estimate in draft.estimates)
    return found + replace(draft, acceptance=acceptance)


class _UsefulTokens:
    """The StoppingRule of lookups: goes on while the prefix acceptance probability is at least `least`, and
    keeps each token's acceptance."""

    def __init__(self, estimator: Estimator, bias: RequestBias, prefix_prob: float, least: float) -> None:
        self.acceptance: list[float] = []
        self._estimator = estimator
        self._bias = bias
        self._prefix_prob = prefix_prob
        self._least = least

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        del request, drafted
        return self._prefix_prob >= self._least

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        del request, drafted
        acceptance = self._estimator.probability(estimate, self._bias)
        self.acceptance.append(acceptance)
        self._prefix_prob *= acceptance
        return True

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        del request, drafted
        return Draft()
