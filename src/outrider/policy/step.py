"""One sequence's decisions in one step: what to draft, from whom, and how far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, TokenEstimate
from outrider.policy.forced import FORCED, forced
from outrider.policy.free import look_up
from outrider.policy.growth import Array, Chain, Growth, expected_tokens
from outrider.policy.knowledge import (
    LONGEST_FORCED_DRAFT,
    LONGEST_LEAD,
    LONGEST_MODEL_DRAFT,
    Batch,
    Knowledge,
)
from outrider.policy.risk import affordable_loss, exploration_s, loss_at_once
from outrider.policy.sharing import Offered
from outrider.policy.text import Asked, Text

__all__ = ["Step"]

_CATCH_UP_STEPS = 6
"""steps over which the cost of reading what a draft model has not seen is spread: they profit too"""
_LOST = 0.75
"""of the cost of a draft step"""
_LONG_REST, _SHORT_REST = 6, 1
"""steps for which draft models that are not worth it are not weighed"""
_MAX_IN_VAIN = 32
"""`Knowledge.num_in_vain` from which on free offers do not wake them"""
_SHORT_ANSWER = 16
_LINDY = 3
"""An answer is expected to go on for so many times its tokens beyond those that short ones have too."""
_READING_SHARE = 0.25
"""of what the answer's tokens so far take plainly: more is not spent on reading its prompt"""


class Step:
    """From the free offers to a finished draft; a draft model is asked in between where that pays."""

    def __init__(
        self, knowledge: Knowledge, text: Text, request: DraftRequest, free: Sequence[Drafter], longest: int
    ) -> None:
        self.request = request
        self.model: str | None = None
        """the draft model that is asked"""
        self.lead = Chain()
        """free tokens in front of the draft model's"""
        self.offer = Draft()
        """what the draft model offered, once it was asked"""
        self.gain_s = 0.0
        """what asking the draft model is expected to gain over not asking"""
        self._knowledge = knowledge
        self._text = text
        self._free = free
        self._longest = min(request.max_tokens, longest)
        self._longest_with_model = LONGEST_FORCED_DRAFT if request.constraint else LONGEST_MODEL_DRAFT
        self._growth = Growth()
        self._phase = text.phase
        self._prefix: tuple[int, ...] = ()
        self._steps_taken = 0
        self._is_lost = False
        text.is_constrained = request.constraint is not None
        self._tail = text.offered = self._look_up(())

    def _look_up(self, prefix: tuple[int, ...]) -> Chain:
        room = self._longest - len(prefix)
        return look_up(self._knowledge, self._text, self._free, self.request, prefix, room)

    @property
    def context(self) -> int:
        """Tokens of the text so far."""
        return self._text.context

    @property
    def _num_forced(self) -> int:
        """Tokens that a constraint forces in front of everything else."""
        sources = self._tail.sources
        return next((i for i, source in enumerate(sources) if source != FORCED), len(sources))

    def price(self, model: str | None, batch: Batch) -> None:
        """Settle the prices of the step, with or without a draft model. What it can cost is limited, but
        never to less than what was drafted already."""
        lead = self._num_forced + LONGEST_LEAD
        prices = self._knowledge.prices(self._text, model, self._longest, batch, lead)
        plain_s = float(prices.calls_s[0])
        self._at_stake_s = loss_at_once(self._knowledge, self._text) * plain_s
        affordable = np.flatnonzero(prices.calls_s - plain_s <= self._at_stake_s)
        longest = max(int(affordable[-1]), len(self._growth))
        self._prices = prices.up_to(longest)
        if model is not None:  # without the limit, which moves with every step: they serve for the next
            self._values = self._knowledge.values(prices, self._longest_with_model)

    # Whether to ask a draft model

    def rests(self) -> bool:
        """Whether the draft models need not be weighed (it takes a while): they were not worth it a moment
        ago and no free offer speaks for them, or they were not for long."""
        if not self._text.rest_left or (self.has_offers and not self._in_vain):
            return False
        self._text.rest_left -= 1
        return True

    def rest(self) -> None:
        """No draft model is worth asking: leave them alone for a while, a longer one where a step of theirs
        would all but certainly be lost."""
        self._knowledge.num_in_vain += 1
        if self._in_vain or not self.has_offers:
            self._text.rest_left = _LONG_REST if self._in_vain or self._is_lost else _SHORT_REST

    @property
    def _in_vain(self) -> bool:
        return self._knowledge.num_in_vain >= _MAX_IN_VAIN

    def weigh(self, model: str) -> int:
        """Behind how many free tokens the draft model is best asked, at the prices that were settled for it;
        `gain_s` then says what it gains."""
        _, without = self._growth.best(self._prices, self._tail)
        gains = self._gains_with_model()
        lead = int(np.argmax(gains))
        self.gain_s = float(gains[lead]) - without
        self._is_lost = self.gain_s < -_LOST * self._prices.step_s
        if not self.has_offers:
            self._text.usual_gain_s[model] = max(self.gain_s, 0.0)
        return lead

    def _gains_with_model(self) -> Array:
        prices = self._prices
        least = self._num_forced
        most = min(len(self._tail), least + LONGEST_LEAD, prices.longest - 1)
        if most < least:
            return np.array([-math.inf])
        expected = 1.0 + expected_tokens(self._tail.chances[:most])
        survivals = np.cumprod([1.0, *self._tail.chances[:most]])
        usual = self._knowledge.outlook.usual
        gains = np.full(most + 1, -math.inf)
        for lead in range(least, most + 1):
            phase = self._phase if lead == 0 else usual
            gains[lead] = expected[lead] * prices.token_s + self._draft_on(lead, phase, survivals[lead])
        if least == 0:
            gains[0] = max(gains[0], self._gain_of_probing())
        caught_up: Array = gains - (prices.first_s[: most + 1] - prices.step_s) / _CATCH_UP_STEPS
        return caught_up

    def _gain_of_probing(self) -> float:
        """The expected gain of one step of the model, after which the free offer is taken if the model
        agrees with it, and the better of its token and nothing if not."""
        prices, tail, growth = self._prices, self._tail, self._growth
        length = len(growth)
        if not tail.tokens or length + 1 > prices.longest:
            return -math.inf
        probing, chance = self._knowledge.probing, tail.chances[0]
        sure = probing.when_agreed * growth.survival
        rest = sure + expected_tokens(tail.chances[1 : prices.longest - length], sure)
        agreed = (rest * prices.token_s - prices.calls_s[length + 1 : length + 1 + len(rest)]).max()
        other = probing.when_disagreed * growth.survival * prices.token_s - prices.calls_s[length + 1]
        agreement = probing.agreement(chance)
        gain = agreement * agreed + (1 - agreement) * max(other, -prices.calls_s[length])
        return float(gain) + growth.expected * prices.token_s - prices.step_s

    def _draft_on(self, length: int, phase: float, survival: float) -> float:
        """What drafting on by at least one step of the model gains, in seconds (`Values.draft_on`)."""
        return self._values.draft_on(length, phase, survival) * float(self._prices.calls_s[0])

    def repays_reading(self, model: str) -> bool:
        """Whether the gain, of this step and of half of the usual ones to come (a free offer that the model
        could confirm is not usual), outweighs that the draft model has yet to read the prompt."""
        text = self._text
        if model in text.readers:
            return True
        remaining = _LINDY * max(text.generated - _SHORT_ANSWER, 0)
        if text.max_tokens is not None:
            remaining = min(remaining, text.max_tokens - text.generated)
        usual_s = text.usual_gain_s.get(model, self.gain_s) if self.has_offers else self.gain_s
        limit_s = _READING_SHARE * text.generated * float(self._prices.calls_s[0])
        return self.gain_s + min(usual_s * remaining / 2, limit_s) > self.reading_s(model)

    def reading_s(self, model: str) -> float:
        """What the draft model has to spend before its first token, beyond a step."""
        read_s = 0.0
        if model not in self._text.readers:
            read_s = self._knowledge.draft_cost(model).prefill_s(self._text.prompt_tokens)
        return read_s + float(self._prices.first_s[0]) - self._prices.step_s

    def may_risk(self) -> bool:
        """Whether the text can afford that drafts of a model go on being worse than expected."""
        return affordable_loss(self._knowledge, self._text) >= 0

    def may_explore(self, model: str) -> bool:
        """Whether finding out how sure the draft model is here is within the bounds."""
        cost_s = self.reading_s(model) + max(-self.gain_s, self._prices.step_s)
        estimator = self._knowledge.estimator(model, constrained=self._text.is_constrained)
        return cost_s <= exploration_s(self._text, estimator)

    # The draft model's turn

    def ask(self, model: str, lead: int, exploring: bool) -> None:
        """Settle on asking the draft model after `lead` free tokens: `request` is then to be put to it."""
        self.model = model
        self._knowledge.num_in_vain //= 2
        self.lead = self._tail.first(lead)
        self._text.asked = Asked(model, tuple(self.lead.tokens), exploring)
        for chance in self.lead.chances:
            self._growth.add(chance)
        if lead:
            self._phase = self._knowledge.outlook.usual
        room = min(self._prices.longest, self._longest_with_model) - lead
        self.request = replace(self.request, prefix=tuple(self.lead.tokens), max_tokens=room)

    def should_continue(self, drafted: Sequence[int]) -> bool:
        """Whether another step of the model pays."""
        if not drafted:
            return True
        prices, length = self._prices, len(self._growth)
        if self._steps_taken * prices.step_s > self._at_stake_s or length >= prices.longest:
            return False
        self._look_behind(drafted)
        _, stop = self._growth.best(prices, self._tail, length if self.request.draw is not None else 0)
        on = self._growth.expected * prices.token_s
        on += self._draft_on(length, self._phase, self._growth.survival)
        return max(on, self._gain_of_probing()) > stop

    def _look_behind(self, drafted: Sequence[int]) -> None:
        """What free drafters say behind the model's tokens."""
        prefix = (*self.lead.tokens, *drafted)
        if prefix != self._prefix:
            self._prefix, self._tail = prefix, self._look_up(prefix)

    def accept(self, estimate: TokenEstimate) -> bool:
        """Whether the token belongs into the draft. One that is certain can still be cut off later."""
        self._steps_taken += 1
        chance = self._chance(estimate, self.model or "")
        phase = self._knowledge.outlook.advance(self._phase, chance)
        if asked := self._text.asked:
            asked.chances.append(chance)
            asked.phases.append(self._phase)
        if self.request.draw is not None and not self._worth_offering(chance, phase):
            return False
        self._phase = phase
        self._growth.add(chance)
        return True

    def append_forced(self, drafted: Sequence[int]) -> Draft:
        """What a constraint forces behind the model's tokens joins them, as far as it has a price."""
        room = self._prices.longest - len(self._growth)
        draft = forced(replace(self.request, max_tokens=len(drafted) + max(room, 0)), drafted)
        for estimate in draft.estimates:
            self._growth.add(self._chance(estimate, FORCED))
        return draft

    def _worth_offering(self, chance: float, phase: float) -> bool:
        """Whether a token that cannot be taken back pays, alone or with those that may follow."""
        growth, prices = self._growth, self._prices
        length, survival = len(growth), growth.survival * chance
        on = self._draft_on(length + 1, phase, survival)
        gain_s = survival * prices.token_s + max(-float(prices.calls_s[length + 1]), on)
        return gain_s >= -float(prices.calls_s[length])

    def _chance(self, estimate: TokenEstimate, name: str) -> float:
        estimator = self._knowledge.estimator(name, constrained=self._text.is_constrained)
        return estimator.probability(estimate, self._text.state(name))

    # The outcome

    @property
    def has_offers(self) -> bool:
        """Whether a free drafter offered anything."""
        return bool(self._tail)

    @property
    def offers_may_pay(self) -> bool:
        """Whether what free drafters offer may be worth a call's rise, if nobody shares the call."""
        return self._knowledge.rises(self.context).may_pay(self._tail.chances)

    def settle(self) -> Offered:
        """All that was found, no longer than what the step may put at stake."""
        offer = self.offer
        if asked := self._text.asked:
            asked.offer = offer
        if self.model is not None and not offer.tokens:  # it found nothing: the free offer stands
            self.lead, self._growth, self._tail = Chain(), Growth(), self._text.offered
        elif self.model is not None:
            self._look_behind(offer.tokens)
        fixed = len(self._growth) if offer.probs is not None else 0
        chances = [*self._growth.chances, *self._tail.chances]
        return Offered(chances[: max(self._prices.longest, fixed)], fixed)

    def draft(self, length: int) -> Draft:
        """The first tokens of all that was found; `settle` comes first."""
        offer, whole = self.offer, Chain()
        whole.append(self.lead)
        named = zip(offer.estimates, offer.sources, strict=True)
        whole.extend(offer, [self._chance(estimate, source) for estimate, source in named])
        whole.append(self._tail)
        return whole.first(length).as_draft(offer, len(self.lead))
