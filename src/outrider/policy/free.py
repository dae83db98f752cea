"""What the free drafters say together, each token with its chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

from outrider.core.contracts import Drafter, Wish
from outrider.core.data import Draft, Hint
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
    wish: Wish,
    prefix: tuple[int, ...],
    limit: int,
) -> Chain:
    """What the free drafters together say follows `prefix`: the most promising offer, and what another goes
    on with behind it. What a constraint forces stands in front of every offer and behind it."""
    chain, left = Chain(), list(free)
    wish = Wish(
        wish.sequence, limit, wish.sampler, prefix=prefix, constraint=wish.constraint, drafting=wish.drafting
    )
    _add_forced(chain, knowledge, text, wish)
    least = knowledge.rises(text.context).worth_seeing
    while left and len(chain) < limit and (survival := math.prod(chain.chances)) >= least:
        best, promise = None, 0.0
        for drafter in left:
            estimator = knowledge.estimator(drafter.name, constrained=text.is_constrained)
            collected = _Collected(estimator, text.state(drafter.name), survival / least)
            asked = wish
            if chain:
                asked = replace(wish, prefix=(*prefix, *chain.tokens), max_tokens=limit - len(chain))
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
        _add_forced(chain, knowledge, text, wish)
        left.remove(drafter)
    return chain


def _add_forced(chain: Chain, knowledge: Knowledge, text: Text, wish: Wish) -> None:
    if wish.constraint is None:
        return
    draft = forced(wish, chain.tokens)
    estimator, state = knowledge.estimator(FORCED, constrained=True), text.state(FORCED)
    chain.extend(draft, [estimator.probability(hint, state) for hint in draft.hints])


class _Collected:
    """Takes every free token that is likely enough to be of use, and notes its chance."""

    def __init__(self, estimator: Estimator, state: TextState, reserve: float) -> None:
        self.chances: list[float] = []
        self._estimator = estimator
        self._state = state
        self._reserve = reserve
        """how much likelier than worth seeing it is that all tokens so far stand"""

    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        del wish, drafted
        return self._reserve >= 1.0

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        del wish, drafted
        chance = self._estimator.probability(hint, self._state)
        self.chances.append(chance)
        self._reserve *= chance
        return True

    def follows(self, wish: Wish, drafted: Sequence[int]) -> Draft:
        del wish, drafted
        return Draft()
