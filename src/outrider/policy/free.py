"""What the free drafters say together, each token with its chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core.contracts import Drafter, Wish
from outrider.core.data import Draft, Hint
from outrider.policy.acceptance import Estimator, TextState
from outrider.policy.forced import FORCED, forced, permitted
from outrider.policy.growth import Chain, expected_tokens
from outrider.policy.knowledge import Knowledge
from outrider.policy.text import Text

__all__ = ["look_up"]

_LEAST_SURVIVAL = 0.02
"""Free tokens that stand more rarely are not looked for."""


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
    wish = replace(wish, prefix=prefix, draw=None, believe=False, max_tokens=limit)
    _add_forced(chain, knowledge, text, wish)
    while left and len(chain) < limit:
        best, promise = None, 0.0
        for drafter in left:
            estimator = knowledge.estimator(drafter.name, constrained=text.is_constrained)
            collected = _Collected(estimator, text.state(drafter.name))
            asked = wish
            if chain:
                asked = replace(wish, prefix=(*prefix, *chain.tokens), max_tokens=limit - len(chain))
            [draft], _ = drafter.propose([asked], collected)
            draft = permitted(asked, draft)
            chances = collected.chances[: len(draft)]
            expected = float(expected_tokens(chances)[-1])
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
    draft = forced(wish, chain.tokens)
    estimator, state = knowledge.estimator(FORCED, constrained=True), text.state(FORCED)
    chain.extend(draft, [estimator.probability(hint, state) for hint in draft.hints])


class _Collected:
    """Takes every free token that is likely enough to be of use, and notes its chance."""

    def __init__(self, estimator: Estimator, state: TextState) -> None:
        self.chances: list[float] = []
        self._estimator = estimator
        self._state = state
        self._survival = 1.0

    def wants(self, wish: Wish, drafted: Sequence[int]) -> bool:
        del wish, drafted
        return self._survival >= _LEAST_SURVIVAL

    def takes(self, wish: Wish, drafted: Sequence[int], hint: Hint) -> bool:
        del wish, drafted
        chance = self._estimator.probability(hint, self._state)
        self.chances.append(chance)
        self._survival *= chance
        return True

    def follows(self, wish: Wish, drafted: Sequence[int]) -> Draft:
        del wish, drafted
        return Draft()
