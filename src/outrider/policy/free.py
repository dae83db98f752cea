"""What the free drafters say together, each token with its chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, TokenEstimate
from outrider.policy.acceptance import Estimator, TextState
from outrider.policy.forced import FORCED, forced, permitted
from outrider.policy.growth import Chain
from outrider.policy.knowledge import Knowledge
from outrider.policy.text import Text

__all__ = ["look_up"]


def look_up(
    knowledge: Knowledge,
    text: Text,
    free: Sequence[Drafter],
    request: DraftRequest,
    prefix: tuple[int, ...],
    limit: int,
) -> Chain:
    """What the free drafters together say follows `prefix`: the most promising offer, and what another goes
    on with behind it. What a constraint forces stands in front of every offer and behind it."""
    chain, left = Chain(), list(free)
    request = DraftRequest(
        request.sequence,
        limit,
        request.sampler,
        prefix=prefix,
        constraint=request.constraint,
        drafting=request.drafting,
    )
    _add_forced(chain, knowledge, text, request)
    least = knowledge.rises(text.context).worth_seeing
    while left and len(chain) < limit and (survival := math.prod(chain.chances)) >= least:
        best, promise = None, 0.0
        for drafter in left:
            estimator = knowledge.estimator(drafter.name, constrained=text.is_constrained)
            collected = _Collected(estimator, text.state(drafter.name), survival / least)
            asked = request
            if chain:
                asked = replace(request, prefix=(*prefix, *chain.tokens), max_tokens=limit - len(chain))
            [draft], _ = drafter.propose([asked], collected)
            draft = permitted(asked, draft)
            chances = collected.chances[: len(draft)]
            expected = sum(accumulate(chances, mul))
            if expected > promise:
                best, promise = (drafter, draft, chances), expected
        if best is None:
            break
        drafter, draft, chances = best
        chain.extend(draft, chances)
        _add_forced(chain, knowledge, text, request)
        left.remove(drafter)
    return chain


def _add_forced(chain: Chain, knowledge: Knowledge, text: Text, request: DraftRequest) -> None:
    if request.constraint is None:
        return
    draft = forced(request, chain.tokens)
    estimator, state = knowledge.estimator(FORCED, constrained=True), text.state(FORCED)
    chain.extend(draft, [estimator.probability(estimate, state) for estimate in draft.estimates])


class _Collected:
    """Takes every free token that is likely enough to be of use, and notes its chance."""

    def __init__(self, estimator: Estimator, state: TextState, reserve: float) -> None:
        self.chances: list[float] = []
        self._estimator = estimator
        self._state = state
        self._reserve = reserve
        """how much likelier than worth seeing it is that all tokens so far stand"""

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        del request, drafted
        return self._reserve >= 1.0

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        del request, drafted
        chance = self._estimator.probability(estimate, self._state)
        self.chances.append(chance)
        self._reserve *= chance
        return True

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        del request, drafted
        return Draft()
