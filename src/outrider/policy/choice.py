"""One sequence's choice in one step: what lookups offer, whether to ask the draft model, and how far to
go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from outrider.core.contracts import DraftInput, DraftRequest, Lookup
from outrider.core.data import DraftToken
from outrider.policy.estimates import average_after, confirmed, refused
from outrider.policy.forced import FORCED, forced, ids, permitted
from outrider.policy.objective import (
    MAX_MODEL_DRAFT,
    StepCosts,
    asking_value,
    best_guess,
    expected_rewards,
    repays,
    stopping_value,
)
from outrider.policy.state import PolicyState, RequestState

_MAX_CONSTRAINED_DRAFT = 40
"""tokens of a draft that the draft model takes part in, where a constraint forces a part of them"""
MIN_USEFUL_PROB = 0.01
"""Lookup tokens are not looked for where their prefix acceptance probability is below this."""
_CATCH_UP_STEPS = 10
"""steps over which the cost of evaluating unread tokens is spread, since they profit too"""
_WITHOUT_MODEL = 0.9
"""what a token takes without the draft model, in plain steps: lookups go on"""
MAX_LOSS = 4.0
"""Plain steps that a text may lose to a draft model whose estimates turn out wrong; a good one has gained
more by then. …"""
EXPLORATION_SHARE = 0.02
"""… A model that is expected to lose is asked to learn how good it is, for as much of a text's steps."""


@dataclass(slots=True)
class SequenceDraft:
    """A draft under construction (`fixed.Growing`). A call of the draft model reads ahead what lookups offer:
    where both say the same the token is confirmed, and where they differ the likelier is taken."""

    state: PolicyState
    text: RequestState
    request: DraftRequest
    lookups: Sequence[Lookup]
    max_length: int
    max_guess: int = 0
    """lookup tokens that a call of the draft model can check"""
    is_asked: bool = False
    """whether the draft model is"""
    candidate: list[DraftToken] = field(init=False)
    """what lookups offer"""
    tokens: list[DraftToken] = field(init=False)
    """what is drafted before the draft model's next token, with calibrated estimates"""
    suffix: list[DraftToken] = field(init=False)
    """what lookups add to it"""
    offers: list[tuple[int, DraftToken]] = field(default_factory=list)
    """what the model offered, taken or not, with its place in the draft and its own calibrated estimate"""
    _average: float = field(init=False)
    _costs: StepCosts = field(init=False)
    _input: DraftInput = field(default=DraftInput(()))

    def __post_init__(self) -> None:
        self.candidate = self._look_up()
        num_forced = sum(1 for _ in takewhile(lambda token: token.source == FORCED, self.candidate))
        self.tokens, self.suffix = self.candidate[:num_forced], self.candidate[num_forced:]
        self._average = self.text.confidence

    @property
    def is_constrained(self) -> bool:
        """Whether the output is limited: estimates differ then."""
        return self.request.constraint is not None

    def _calibrated(self, token: DraftToken) -> DraftToken:
        estimator = self.state.estimator(token.source, constrained=self.is_constrained)
        return token._replace(acceptance=estimator.probability(token.evidence, self.text.bias(token.source)))

    # Lookups

    def _forced(self, drafted: Sequence[int]) -> list[DraftToken]:
        return [self._calibrated(token) for token in forced(self.request, drafted)]

    def _look_up(self, drafted: Sequence[int] = ()) -> list[DraftToken]:
        """What follows `drafted`: of the lookups the offer with the most expected tokens, then what another
        goes on with after it, and what a constraint forces before each and after it."""
        limit = self.max_length - len(drafted)
        if limit <= 0:
            return []
        found, left = self._forced(drafted)[:limit], list(self.lookups)
        while left and len(found) < limit:
            so_far = (*drafted, *ids(found))
            prefix_prob = math.prod(_acceptance(found))
            offers = [self._offer(lookup, so_far, limit - len(found), prefix_prob) for lookup in left]
            expected, best = max((expected, -i) for i, (expected, _) in enumerate(offers))
            if expected <= 0.0:
                break
            del left[-best]
            found += offers[-best][1]
            found += self._forced((*drafted, *ids(found)))[: limit - len(found)]
        return found

    def _offer(
        self, lookup: Lookup, drafted: Sequence[int], limit: int, prefix_prob: float
    ) -> tuple[float, list[DraftToken]]:
        """A lookup's expected tokens and its offer, as far as it is useful."""
        found: list[DraftToken] = []
        prefix_probs: list[float] = []
        if prefix_prob >= MIN_USEFUL_PROB:
            for token in islice(lookup.propose(self.request.sequence, drafted), limit):
                found.append(self._calibrated(token))
                prefix_prob *= found[-1].acceptance
                prefix_probs.append(prefix_prob)
                if prefix_prob < MIN_USEFUL_PROB:
                    break
        allowed = permitted(self.request, drafted, found)
        return sum(prefix_probs[: len(allowed)]), list(allowed)

    # Whether to ask the draft model

    def plan(self, costs: StepCosts, plain_s: float, num_sequences: int) -> bool:
        """Whether the draft model is asked in this step, which takes `plain_s` plainly: where it is expected
        to gain and its reading of the prompt is repaid; else to learn how good it is, for a small loss."""
        if self.request.max_step_s is not None:
            costs = costs.limited(self.request.max_step_s, num_sequences=num_sequences)
        self._costs, text = costs, self.text
        if len(self.tokens) >= self._longest:
            return False
        read_s = float(costs.first_draft_s[0]) - costs.draft_step_s
        gain_s = self._gain_s(costs) - read_s / _CATCH_UP_STEPS
        is_repaid = True
        if unread := text.draft.unread_prompt:
            saved_s = self._gain_s(replace(costs, reward_s=_WITHOUT_MODEL * plain_s / num_sequences))
            before = text.draft.held - text.draft.unread - unread
            read_s += self.state.draft_costs.prefill_s(unread, context=before)
            is_repaid = repays(read_s, saved_s, text.generated, text.max_tokens, plain_s)
        budget = text.model_gain + MAX_LOSS
        if gain_s <= 0 or not is_repaid:
            loss_s = read_s + max(-gain_s, costs.draft_step_s)
            budget = EXPLORATION_SHARE * text.generated + min(text.model_gain, 0.0) - loss_s / plain_s
        self.is_asked = budget >= 0
        return self.is_asked

    def _gain_s(self, costs: StepCosts) -> float:
        """What another call of the draft model is expected to earn over stopping here, less its cost."""
        length, drafted = len(self.tokens), _acceptance(self.tokens)
        # Sampled tokens cannot be cut.
        min_length = length if self.offers and self.request.draw is not None else 0
        stop_s = stopping_value([*drafted, *_acceptance(self.suffix)], costs, min_length)
        stop_s -= expected_rewards(drafted, costs)[-1]
        guess = _acceptance(self._guess(costs))
        reached = math.prod(drafted)
        asked_s = asking_value(length, self._average, reached, costs, self._longest, guess, stop_s)
        return asked_s - stop_s

    @property
    def _longest(self) -> int:
        most = _MAX_CONSTRAINED_DRAFT if self.is_constrained else MAX_MODEL_DRAFT
        return self._costs.longest(most)

    def _guess(self, costs: StepCosts) -> list[DraftToken]:
        """What of the lookups' offer the next call reads."""
        most = min(self.max_guess, self._longest - len(self.tokens) - 1)
        if not self.suffix or not most:
            return []
        return self.suffix[: best_guess(_acceptance(self.suffix), costs, most)]

    # What the draft model says

    def next_input(self) -> DraftInput:
        self._input = DraftInput(ids(self.tokens), ids(self._guess(self._costs)))
        return self._input

    def take(self, offers: Iterable[DraftToken]) -> bool:
        drafted, guess = self._input
        num_offered = len(self.offers)
        for place, offer in enumerate(offers):
            if ids(self.tokens) != (*drafted, *guess[:place]):
                break  # the draft has left the guess
            if not self._add(offer):
                return False
        return len(self.offers) > num_offered and self._goes_on()

    def _goes_on(self) -> bool:
        """Whether another step of the model pays; of a block it costs nothing to look at what can be cut."""
        if self.state.block > 1 and self.request.draw is None:
            return math.prod(_acceptance(self.tokens)) >= MIN_USEFUL_PROB
        return self._gain_s(self._later_costs) > 0

    @property
    def _later_costs(self) -> StepCosts:
        """Those after the model's first step: what a block drafted has been paid for."""
        return replace(self._costs, draft_step_s=0.0) if self.state.block > 1 else self._costs

    def _add(self, offer: DraftToken) -> bool:
        """Add a token of the model's, and what is forced after it; whether more may follow."""
        offer = self._calibrated(offer)
        average = average_after(self._average, offer.acceptance)
        self.offers.append((len(self.tokens), offer))
        if offer.drawn_from is not None and not self._sampled_token_pays(offer.acceptance, average):
            return False
        self._average = average
        self.tokens.append(self._chosen(offer))
        self.tokens += self._forced(ids(self.tokens))[: max(self._costs.max_length - len(self.tokens), 0)]
        self.suffix = self._look_up(ids(self.tokens))
        return len(self.tokens) < self._longest

    def _chosen(self, offer: DraftToken) -> DraftToken:
        """The model's token or the lookup's, with what both say of it. A sampled one stays, whatever it
        is."""
        if not self.suffix or offer.drawn_from is not None:
            return offer
        said = self.suffix[0]
        if said.token == offer.token:
            return offer._replace(acceptance=confirmed(said.acceptance, offer.acceptance))
        lookup, own = refused(said.acceptance, offer.acceptance)
        if lookup > own:
            return said._replace(acceptance=lookup)
        return offer._replace(acceptance=own)

    def _sampled_token_pays(self, acceptance: float, average: float) -> bool:
        """Whether a token that cannot be removed pays, alone or with those that may follow."""
        costs, length = self._later_costs, len(self.tokens)
        drafted = [*_acceptance(self.tokens), acceptance]
        before, after = expected_rewards(drafted, costs)[-2:]
        on_s = asking_value(length + 1, average, math.prod(drafted), costs, self._longest)
        value_s = after - before + max(-float(costs.calls_s[length + 1]), on_s)
        return value_s >= -float(costs.calls_s[length])

    def finish(self) -> tuple[list[DraftToken], int]:
        """All that was found, and how many tokens of it must be drafted."""
        if not self.offers:
            return self.candidate, 0
        is_sampled = any(token.drawn_from is not None for token in self.tokens)
        num_fixed = len(self.tokens) if is_sampled else 0
        return [*self.tokens, *self.suffix][: max(self._costs.max_length, num_fixed)], num_fixed


def _acceptance(tokens: Iterable[DraftToken]) -> list[float]:
    return [token.acceptance for token in tokens]
