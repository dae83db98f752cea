"""One sequence's decisions in one step: what to draft, from whom, and how far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core.contracts import Drafter, Wish
from outrider.core.data import Distribution, Draft, Hint
from outrider.policy.acceptance import Estimator, TextState
from outrider.policy.growth import Array, Chain, Growth, Prices, expected_tokens
from outrider.policy.knowledge import LONGEST_LEAD, LONGEST_MODEL_DRAFT, Asked, Knowledge, Text
from outrider.policy.outlook import Values

__all__ = ["Step", "look_up"]

_LEAST_SURVIVAL = 0.02
"""Free tokens that stand more rarely are not looked for."""
_AGREED = 0.97
"""the acceptance of a token that a lookup and a draft model agree on"""
_DISAGREED = 0.6
"""the acceptance of a draft model's token where a lookup says another"""
_CATCH_UP_STEPS = 6
"""steps over which the cost of reading what a draft model has not seen is spread: they profit too"""
_RISK_TOKENS = 2.5
_RISK = 0.03
_FIRST_TOKENS = 6
_LINDY = 2
"""How much longer an answer is expected to go on: so many tokens at first, and more the longer it has
been. The limit that a request sets is seldom reached, and an answer may be a single word."""


class Step:
    """From the free offers to a finished draft; a draft model is asked in between where that pays."""

    def __init__(
        self, knowledge: Knowledge, text: Text, wish: Wish, free: Sequence[Drafter], longest: int
    ) -> None:
        self.wish = wish
        self.lead = Chain()
        """free tokens in front of the draft model's"""
        self.offer = Draft()
        """what the draft model offered, once it was asked"""
        self.gain_s = 0.0
        """what asking the draft model is expected to gain over not asking"""
        self._knowledge = knowledge
        self._text = text
        self._free = free
        self._longest = min(wish.max_tokens, longest)
        self._growth = Growth()
        self._phase = text.phase
        self._model: str | None = None
        self._tail = text.offered = self._look_up((), self._longest)

    def _look_up(self, prefix: tuple[int, ...], limit: int) -> Chain:
        return look_up(self._knowledge, self._text, self._free, replace(self.wish, prefix=prefix), limit)

    @property
    def context(self) -> int:
        """Tokens of the text so far."""
        return self._text.prompt_tokens + self._text.generated

    def price(self, model: str | None, others: int, num_sequences: int) -> Prices:
        """Settle the prices of the step, with or without a draft model."""
        self._prices = self._knowledge.prices(self._text, model, self._longest, others, num_sequences)
        return self._prices

    # Whether to ask a draft model

    def weigh(self) -> int:
        """Behind how many free tokens the draft model is best asked; `gain_s` then says what it gains."""
        _, without = self._growth.best(self._prices, self._tail)
        gains = self._gains_with_model()
        lead = int(np.argmax(gains))
        self._expected_s = float(gains[lead])
        self.gain_s = self._expected_s - without
        self.gain_s += self._text.returns[bool(self._tail)].mean * self._prices.token_s
        return lead

    def _gains_with_model(self) -> Array:
        prices, values = self._prices, self._values()
        most = min(len(self._tail), LONGEST_LEAD, prices.longest - 1)
        if most < 0:
            return np.array([-math.inf])
        expected = 1.0 + expected_tokens(self._tail.chances[:most])
        survivals = np.cumprod([1.0, *self._tail.chances[:most]])
        usual = self._knowledge.outlook.usual
        gains = np.empty(most + 1)
        for lead in range(most + 1):
            phase = self._phase if lead == 0 else usual
            gains[lead] = expected[lead] * prices.token_s + values.draft_on(lead, phase, survivals[lead])
        gains[0] = max(gains[0], self._gain_of_probing())
        return gains - (prices.first_s[: most + 1] - prices.step_s) / _CATCH_UP_STEPS

    def _gain_of_probing(self) -> float:
        """The expected gain of one step of the model, after which the free offer is taken if the model
        agrees with it, and the better of its token and nothing if not."""
        prices, tail, growth = self._prices, self._tail, self._growth
        length = len(growth)
        if not tail.tokens or length + 1 > prices.longest:
            return -math.inf
        sure = _AGREED * growth.survival
        rest = sure + expected_tokens(tail.chances[1 : prices.longest - length], sure)
        agreed = (rest * prices.token_s - prices.calls_s[length + 1 : length + 1 + len(rest)]).max()
        other = _DISAGREED * growth.survival * prices.token_s - prices.calls_s[length + 1]
        chance = tail.chances[0]
        gain = chance * agreed + (1 - chance) * max(other, -prices.calls_s[length])
        return float(gain) + growth.expected * prices.token_s - prices.step_s

    def _values(self) -> Values:
        return self._knowledge.values(self._prices)

    def repays_reading(self, model: str) -> bool:
        """Whether the gain outweighs that the draft model has yet to read the prompt. Not every step will
        gain as much: half is counted on."""
        text = self._text
        if model in text.readers:
            return True
        remaining = _FIRST_TOKENS + _LINDY * text.generated
        if text.max_tokens is not None:
            remaining = min(remaining, text.max_tokens - text.generated)
        return self.gain_s * remaining / 2 > self.reading_s(model)

    def reading_s(self, model: str) -> float:
        """What the draft model has to spend before its first token, beyond a step."""
        read_s = 0.0
        if model not in self._text.readers:
            read_s = self._knowledge.draft_cost(model).prefill_s(self._text.prompt_tokens)
        return read_s + float(self._prices.first_s[0]) - self._prices.step_s

    def may_risk(self) -> bool:
        """Whether the text can afford that its model drafts go on being worse than expected."""
        text, prices = self._text, self._prices
        return text.behind_s <= (_RISK_TOKENS + _RISK * text.generated) * prices.calls_s[0]

    def explores(self, cost_s: float, most_share: float) -> bool:
        """Whether so much may be spent on finding out; it is then held to be spent."""
        text = self._text
        if text.explored_s + cost_s > most_share * text.decoded_s:
            return False
        text.explored_s += cost_s
        return True

    # The draft model's turn

    def ask(self, model: str, lead: int) -> Wish:
        """Settle on asking the draft model behind `lead` free tokens; the wish to put to it."""
        self._model = model
        self._text.asked = Asked(model, lead, self._expected_s, self._prices, bool(self._tail))
        self.lead = self._tail.first(lead)
        for chance in self.lead.chances:
            self._growth.add(chance)
        if lead:
            self._phase = self._knowledge.outlook.usual
        room = min(self._longest, LONGEST_MODEL_DRAFT) - lead
        self.wish = replace(self.wish, prefix=tuple(self.lead.tokens), max_tokens=room)
        return self.wish

    def wants(self, drafted: Sequence[int]) -> bool:
        """Whether another step of the model pays."""
        if not drafted:
            return True
        tokens = (*self.lead.tokens, *drafted)
        self._tail = self._look_up(tokens, self._longest - len(tokens))
        least = len(tokens) if self.wish.draw is not None else 0
        _, stop = self._growth.best(self._prices, self._tail, least)
        on = self._values().draft_on(len(tokens), self._phase, self._growth.survival)
        return max(self._growth.expected * self._prices.token_s + on, self._gain_of_probing()) > stop

    def takes(self, hint: Hint) -> bool:
        """Whether the token belongs into the draft. One that is certain can still be cut off later."""
        chance = self._chance(hint)
        phase = self._knowledge.outlook.advance(self._phase, chance)
        if asked := self._text.asked:
            asked.chances.append(chance)
            asked.phases.append(self._phase)
        if self.wish.draw is not None and not self._worth_offering(chance, phase):
            return False
        self._phase = phase
        self._growth.add(chance)
        return True

    def _worth_offering(self, chance: float, phase: float) -> bool:
        """Whether a token that cannot be taken back pays, alone or with those that may follow."""
        growth, prices = self._growth, self._prices
        length, survival = len(growth), growth.survival * chance
        on = self._values().draft_on(length + 1, phase, survival)
        return survival * prices.token_s + max(-prices.calls_s[length + 1], on) >= -prices.calls_s[length]

    def _chance(self, hint: Hint) -> float:
        name = self._model or ""
        return self._knowledge.estimator(name).probability(hint, self._text.state(name))

    # The outcome

    def draft(self) -> Draft:
        """The best length of all that was found."""
        offer = self.offer
        if asked := self._text.asked:
            asked.offer = offer
        if self._model is not None and not offer.tokens:  # it found nothing: the free offer stands
            self.lead, self._growth, self._tail = Chain(), Growth(), self._text.offered
        elif self._model is not None:
            tokens = (*self.lead.tokens, *offer.tokens)
            self._tail = self._look_up(tokens, self._longest - len(tokens))
        fixed = len(self.lead) + len(offer) if offer.probs is not None else 0
        length, _ = self._growth.best(self._prices, self._tail, fixed)
        whole = Chain()
        whole.append(self.lead)
        whole.extend(offer, [self._chance(hint) for hint in offer.hints])
        whole.append(self._tail)
        return _as_draft(whole.first(length), offer, len(self.lead))


def look_up(knowledge: Knowledge, text: Text, free: Sequence[Drafter], wish: Wish, limit: int) -> Chain:
    """What the free drafters together say follows the wish's prefix: the most promising offer, and what
    another goes on with behind it."""
    chain, left = Chain(), list(free)
    wish = replace(wish, draw=None, believe=False)
    prefix = wish.prefix
    while left and len(chain) < limit:
        best, promise = None, 0.0
        for drafter in left:
            collected = _Collected(knowledge.estimator(drafter.name), text.state(drafter.name))
            asked = replace(wish, prefix=(*prefix, *chain.tokens), max_tokens=limit - len(chain))
            [draft], _ = drafter.propose([asked], collected)
            expected = float(expected_tokens(collected.chances)[-1])
            if expected > promise:
                best, promise = (drafter, draft, collected.chances), expected
        if best is None:
            break
        drafter, draft, chances = best
        chain.extend(draft, chances)
        left.remove(drafter)
    return chain


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


def _as_draft(chain: Chain, offer: Draft, lead: int) -> Draft:
    """A chain as a draft. Free tokens are certain, among drawn ones too."""

    def spread(known: tuple[Distribution, ...]) -> tuple[Distribution, ...]:
        certain = [Distribution(np.array([token]), np.ones(1)) for token in chain.tokens]
        certain[lead : lead + len(known)] = known
        return tuple(certain[: len(chain)])

    return Draft(
        tokens=tuple(chain.tokens),
        probs=spread(offer.probs) if offer.probs is not None else None,
        acceptance=tuple(chain.chances),
        sources=tuple(chain.sources),
        hints=tuple(chain.hints),
        beliefs=spread(offer.beliefs) if offer.beliefs and len(chain) > lead else (),
    )
