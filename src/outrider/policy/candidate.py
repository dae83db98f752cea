"""Drafts under construction: what lookups and constraints offer together, and a draft that grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Distribution, Draft, TokenEstimate, point_masses
from outrider.policy.estimates import Estimator, RequestBias
from outrider.policy.forced import FORCED, forced, permitted
from outrider.policy.objective import StepCosts, stopping_value
from outrider.policy.state import PolicyState, RequestState


@dataclass(slots=True)
class DraftCandidate:
    """Point-mass tokens that may come next; `acceptance` holds the probability that each is accepted if all
    before it are."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    estimates: list[TokenEstimate] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)

    def extend(self, draft: Draft, acceptance: Sequence[float]) -> None:
        """Append what a drafter offered."""
        self.tokens += draft.tokens
        self.sources += draft.sources
        self.estimates += draft.estimates
        self.acceptance += acceptance

    def append(self, other: DraftCandidate) -> None:
        """Append another candidate."""
        self.tokens += other.tokens
        self.sources += other.sources
        self.estimates += other.estimates
        self.acceptance += other.acceptance

    def first(self, length: int) -> DraftCandidate:
        """Its first tokens."""
        return DraftCandidate(
            self.tokens[:length], self.sources[:length], self.estimates[:length], self.acceptance[:length]
        )

    def as_draft(self, offer: Draft, start: int) -> Draft:
        """A draft of these tokens, of which those from `start` on are a draft model's `offer`, as far as it
        goes. The others get point masses where these have distributions."""

        def spread(known: tuple[Distribution, ...]) -> tuple[Distribution, ...]:
            distributions = list(point_masses(self.tokens))
            distributions[start : start + len(known)] = known
            return tuple(distributions[: len(self)])

        return Draft(
            tokens=tuple(self.tokens),
            probs=spread(offer.probs) if offer.probs is not None else None,
            acceptance=tuple(self.acceptance),
            sources=tuple(self.sources),
            estimates=tuple(self.estimates),
            greedy_probs=spread(offer.greedy_probs) if offer.greedy_probs and len(self) > start else (),
        )

    def __len__(self) -> int:
        return len(self.tokens)


class DraftBuilder:
    """The draft of one sequence while it grows: tokens of lookups, of a draft model, of lookups again."""

    def __init__(self) -> None:
        self.acceptance: list[float] = []
        self.prefix_prob = 1.0
        """the probability that all tokens so far are accepted"""
        self.expected = 1.0
        """tokens that the step is expected to emit, the target's own included"""

    def __len__(self) -> int:
        return len(self.acceptance)

    def add(self, acceptance: float) -> None:
        """One more token, which is accepted with this probability if all before it are."""
        self.acceptance.append(acceptance)
        self.prefix_prob *= acceptance
        self.expected += self.prefix_prob

    def stopping_value(self, costs: StepCosts, suffix: Sequence[float], *, may_cut: bool = True) -> float:
        """The value of the step in seconds if no model is asked any more, but lookup tokens of the acceptance
        `suffix` may follow; `may_cut` allows fewer tokens than it has."""
        return stopping_value([*self.acceptance, *suffix], costs, 0 if may_cut else len(self))


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

    lookup: DraftCandidate = field(default_factory=DraftCandidate)
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
) -> DraftCandidate:
    """What the model-free drafters together say follows `prefix`: the offer with the most expected tokens,
    and what another goes on with after it. What a constraint forces comes before every offer and after it."""
    candidate, left = DraftCandidate(), list(lookups)
    request = DraftRequest(
        request.sequence,
        limit,
        request.sampler,
        prefix=prefix,
        constraint=request.constraint,
        drafting=request.drafting,
    )
    _add_forced(candidate, state, text, request)
    least = state.marginal_costs(text.context).min_useful_prob
    while left and len(candidate) < limit and (prefix_prob := math.prod(candidate.acceptance)) >= least:
        best, most_expected = None, 0.0
        for drafter in left:
            estimator = state.estimator(drafter.name, constrained=request.constraint is not None)
            collected = _UsefulTokens(estimator, text.bias(drafter.name), prefix_prob / least)
            asked = request
            if candidate:
                room = limit - len(candidate)
                asked = replace(request, prefix=(*prefix, *candidate.tokens), max_tokens=room)
            [draft], _ = drafter.propose([asked], collected)
            draft = permitted(asked, draft)
            acceptance = collected.acceptance[: len(draft)]
            expected = sum(accumulate(acceptance, mul))
            if expected > most_expected:
                best, most_expected = (drafter, draft, acceptance), expected
        if best is None:
            break
        drafter, draft, acceptance = best
        candidate.extend(draft, acceptance)
        _add_forced(candidate, state, text, request)
        left.remove(drafter)
    return candidate


def _add_forced(
    candidate: DraftCandidate, state: PolicyState, text: RequestState, request: DraftRequest
) -> None:
    if request.constraint is None:
        return
    draft = forced(request, candidate.tokens)
    estimator, bias = state.estimator(FORCED, constrained=True), text.bias(FORCED)
    candidate.extend(draft, [estimator.probability(estimate, bias) for estimate in draft.estimates])


class _UsefulTokens:
    """The StoppingRule of lookups: goes on while the prefix acceptance probability is of use (`reserve` of 1
    or more), and keeps each token's acceptance."""

    def __init__(self, estimator: Estimator, bias: RequestBias, reserve: float) -> None:
        self.acceptance: list[float] = []
        self._estimator = estimator
        self._bias = bias
        self._reserve = reserve

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        del request, drafted
        return self._reserve >= 1.0

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        del request, drafted
        acceptance = self._estimator.probability(estimate, self._bias)
        self.acceptance.append(acceptance)
        self._reserve *= acceptance
        return True

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        del request, drafted
        return Draft()
