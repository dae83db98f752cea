"""One sequence's choice in one step: what lookups offer, whether to ask the draft model, and how far to
go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from outrider.core.contracts import DraftInput, DraftRequest, Lookup
from outrider.core.data import DraftToken
from outrider.policy.estimates import TextConfidence, confirmed, refused
from outrider.policy.forced import FORCED, forced, permitted
from outrider.policy.objective import (
    StepCosts,
    amortises_prefill,
    asking_value,
    best_guess,
    expected_rewards,
    exploration_budget_s,
    stopping_value,
)
from outrider.policy.state import (
    MAX_CONSTRAINED_MODEL_DRAFT,
    MAX_MODEL_DRAFT,
    BatchState,
    PolicyState,
    RequestState,
)

_CATCH_UP_STEPS = 10
"""steps over which the cost of evaluating uncached tokens is spread, since they profit too"""
_WITHOUT_MODEL = 0.9
"""what a token takes without the draft model, in plain steps: lookups go on"""
MAX_LOSS_STEPS = 4.0
"""Plain steps that a text may lose to a draft model whose estimates turn out wrong. After that the model is
asked only to explore; a good one has gained more by then."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request, who drafts for it without a model, and what is known."""

    state: PolicyState
    text: RequestState
    request: DraftRequest
    lookups: Sequence[Lookup]
    max_length: int
    max_guess: int = 0
    """lookup tokens that a call of the draft model can check"""

    @property
    def is_constrained(self) -> bool:
        """Whether the output is limited: estimates differ then."""
        return self.request.constraint is not None

    def acceptance(self, token: DraftToken) -> float:
        """The calibrated estimate of a token that a drafter offers."""
        estimator = self.state.estimator(token.source, constrained=self.is_constrained)
        return estimator.probability(token.evidence, self.text.bias(token.source))

    def forced(self, drafted: Sequence[int]) -> list[DraftToken]:
        """What a constraint forces after `drafted`, with calibrated estimates."""
        found = forced(self.request, drafted)
        return [token._replace(acceptance=self.acceptance(token)) for token in found]

    def look_up(self, drafted: Sequence[int] = ()) -> list[DraftToken]:
        """What the model-free drafters together say follows `drafted`: the offer with the most expected
        tokens, and what another goes on with after it. What a constraint forces comes before every offer and
        after it."""
        limit = self.max_length - len(drafted)
        if limit <= 0:
            return []
        least = self.state.marginal_costs(self.text.context).min_useful_prob
        found, left = self.forced(drafted)[:limit], list(self.lookups)
        while left and len(found) < limit:
            prefix_prob = math.prod(token.acceptance for token in found)
            so_far = (*drafted, *(token.token for token in found))
            offers = [self._offer(lookup, so_far, limit - len(found), prefix_prob, least) for lookup in left]
            expected, best = max((expected, -i) for i, (expected, _) in enumerate(offers))
            if expected <= 0.0:
                break
            del left[-best]
            found += offers[-best][1]
            found += self.forced((*drafted, *(token.token for token in found)))[: limit - len(found)]
        return found

    def _offer(
        self, lookup: Lookup, drafted: Sequence[int], limit: int, prefix_prob: float, least: float
    ) -> tuple[float, list[DraftToken]]:
        """A lookup's expected tokens and its offer, as far as the prefix acceptance probability is at `least`
        so great."""
        found: list[DraftToken] = []
        prefix_probs: list[float] = []
        if prefix_prob >= least:
            for token in islice(lookup.propose(self.request.sequence, drafted), limit):
                calibrated = token._replace(acceptance=self.acceptance(token))
                found.append(calibrated)
                prefix_prob *= calibrated.acceptance
                prefix_probs.append(prefix_prob)
                if prefix_prob < least:
                    break
        allowed = permitted(self.request, drafted, found)
        return sum(prefix_probs[: len(allowed)]), list(allowed)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Asking the draft model in this step: at what costs, and what that is expected to gain over not asking
    it, in seconds. `is_exploring`: it is asked to learn how good it is."""

    costs: StepCosts
    gain_s: float
    is_exploring: bool = False


def plan_model(asking: Asking, candidate: Sequence[DraftToken], batch: BatchState) -> ModelPlan | None:
    """How to ask the draft model; None where it is not expected to pay, nor worth a try."""
    state, text, request = asking.state, asking.text, asking.request
    costs = state.step_costs(text, asking.max_length, batch, num_forced(candidate) + asking.max_guess)
    if request.max_step_s is not None:
        costs = costs.limited(request.max_step_s, batch.num_sequences)
    gain_s = _gain_s(asking, candidate, costs)
    read_s = float(costs.first_draft_s[0]) - costs.draft_step_s
    if text.uncached is None:
        read_s += state.draft_costs.prefill_s(text.prompt_tokens)
    pays = gain_s > 0 and text.model_gain_steps >= -MAX_LOSS_STEPS
    plan = ModelPlan(costs, gain_s)
    if pays and (text.uncached is not None or _is_repaid(asking, candidate, costs, batch, read_s)):
        return plan
    cost_s = read_s + max(-gain_s, costs.draft_step_s)
    if cost_s <= exploration_budget_s(text.decoded_s, text.explored_s):
        return replace(plan, is_exploring=True)
    return None


def num_forced(candidate: Sequence[DraftToken]) -> int:
    """How many tokens of a candidate a constraint forces before any other."""
    return sum(1 for _ in takewhile(lambda token: token.source == FORCED, candidate))


def _gain_s(asking: Asking, candidate: Sequence[DraftToken], costs: StepCosts) -> float:
    """What asking the model is expected to gain over not asking it, in seconds."""
    acceptance, first = [token.acceptance for token in candidate], num_forced(candidate)
    longest = costs.longest(max_model_draft(asking.request))
    rewards, guess = expected_rewards(acceptance[:first], costs), acceptance[first:]
    if first >= longest:
        return -math.inf
    guess = guess[: best_guess(guess, costs, min(asking.max_guess, longest - first - 1))]
    average = asking.text.confidence.average
    stop_s = stopping_value(acceptance, costs) - rewards[-1]
    value_s = asking_value(first, average, math.prod(acceptance[:first]), costs, longest, guess, stop_s)
    return value_s - (float(costs.first_draft_s[0]) - costs.draft_step_s) / _CATCH_UP_STEPS - stop_s


def _is_repaid(
    asking: Asking, candidate: Sequence[DraftToken], costs: StepCosts, batch: BatchState, read_s: float
) -> bool:
    """Whether what this and later steps save repays reading the prompt for the draft model: a token without
    it takes almost a plain step. What confirming a candidate saves is not expected again."""
    text, size = asking.text, batch.num_sequences
    plain_s = asking.state.costs.call_s(size, context=batch.context, num_sequences=size)
    without_s = _WITHOUT_MODEL * plain_s / size
    saved_s = _gain_s(asking, candidate, replace(costs, reward_s=without_s))
    return amortises_prefill(
        read_s,
        gain_s=saved_s,
        usual_gain_s=saved_s,
        generated=text.generated,
        max_tokens=text.max_tokens,
        plain_s=plain_s,
    )


def max_model_draft(request: DraftRequest) -> int:
    """The longest draft that the draft model takes part in."""
    return MAX_CONSTRAINED_MODEL_DRAFT if request.constraint else MAX_MODEL_DRAFT


@dataclass(slots=True)
class ModelDraft:
    """A draft that the draft model extends (`rounds.Growing`). Its calls read ahead what lookups offer: where
    both say the same the token is confirmed, and where they differ the likelier is taken.

    A sampled token is never removed. Whether another is sampled may depend on those before it, never on what
    it is itself.
    """

    asking: Asking
    plan: ModelPlan
    candidate: Sequence[DraftToken]
    """what lookups offered"""
    tokens: list[DraftToken] = field(init=False)
    """the draft so far, with calibrated estimates"""
    suffix: list[DraftToken] = field(init=False)
    """what lookups add to it"""
    offers: list[tuple[int, DraftToken]] = field(default_factory=list)
    """what the model offered, taken or not, with its place in the draft and its own calibrated estimate"""
    _average: float = field(init=False)
    _input: DraftInput = field(default=DraftInput(()))

    def __post_init__(self) -> None:
        self.tokens = list(self.candidate[: self.num_forced])
        self.suffix = list(self.candidate[self.num_forced :])
        self._average = self.asking.text.confidence.average

    @property
    def request(self) -> DraftRequest:
        return self.asking.request

    @property
    def read(self) -> tuple[int, ...]:
        """Drafted and guessed tokens that the model has evaluated last; a block drafter reads none."""
        return self._input.drafted + self._input.guess if self.plan.costs.block == 1 else ()

    @property
    def num_forced(self) -> int:
        """Tokens before the model's own."""
        return num_forced(self.candidate)

    def next_input(self) -> DraftInput:
        guess = [token.token for token in self._guess()]
        self._input = DraftInput(tuple(token.token for token in self.tokens), tuple(guess))
        return self._input

    def take(self, offers: Iterable[DraftToken]) -> bool:
        drafted, guess = self._input
        num_offered = len(self.offers)
        for place, offer in enumerate(offers):
            if [token.token for token in self.tokens] != [*drafted, *guess[:place]]:
                break  # the draft has left the guess
            if not self._add(offer):
                return False
        return len(self.offers) > num_offered and self._goes_on()

    def _add(self, offer: DraftToken) -> bool:
        """Add a token of the model's, and what is forced after it; whether more may follow."""
        calibrated = offer._replace(acceptance=self.asking.acceptance(offer))
        average = TextConfidence.after(self._average, calibrated.acceptance)
        self.offers.append((len(self.tokens), calibrated))
        if offer.drawn_from is not None and not self._sampled_token_pays(calibrated.acceptance, average):
            return False
        self._average = average
        chosen = self._chosen(calibrated)
        drafted = [*(token.token for token in self.tokens), chosen.token]
        after = self.asking.forced(drafted)[: max(self.plan.costs.max_length - len(drafted), 0)]
        self.tokens += [chosen, *after]
        self.suffix = self.asking.look_up([*drafted, *(token.token for token in after)])
        return len(self.tokens) < self._longest

    def _chosen(self, offer: DraftToken) -> DraftToken:
        """The model's token or the lookup's at this place, with what both together say of it. A sampled one
        stays: what it is must not matter."""
        if not self.suffix or offer.drawn_from is not None:
            return offer
        said = self.suffix[0]
        if said.token == offer.token:
            return offer._replace(acceptance=confirmed(said.acceptance, offer.acceptance))
        lookup, own = refused(said.acceptance, offer.acceptance)
        if lookup > own:
            return said._replace(acceptance=lookup)
        return offer._replace(acceptance=own)

    @property
    def _longest(self) -> int:
        return self.plan.costs.longest(max_model_draft(self.request))

    @property
    def _later_costs(self) -> StepCosts:
        """The costs after the model's first step: of what that drafted nothing is to be paid any more."""
        costs = self.plan.costs
        return replace(costs, draft_step_s=0.0) if costs.block > 1 else costs

    @property
    def _least_prob(self) -> float:
        """The prefix acceptance probability below which no token is worth a look."""
        return self.asking.state.marginal_costs(self.asking.text.context).min_useful_prob

    def _guess(self) -> list[DraftToken]:
        """What of the lookups' offer the next call reads."""
        acceptance = [token.acceptance for token in self.suffix]
        most = min(self.asking.max_guess, self._longest - len(self.tokens) - 1)
        return self.suffix[: best_guess(acceptance, self.plan.costs, most)]

    def _goes_on(self) -> bool:
        """Whether another step of the model pays."""
        costs, length = self._later_costs, len(self.tokens)
        drafted = [token.acceptance for token in self.tokens]
        if costs.block > 1 and self.request.draw is None:  # looking at what is there and can be cut is free
            return math.prod(drafted) >= self._least_prob
        min_length = 0 if self.request.draw is None else length  # sampled tokens cannot be cut
        stop_s = stopping_value([*drafted, *(token.acceptance for token in self.suffix)], costs, min_length)
        stop_s -= expected_rewards(drafted, costs)[-1]
        guess = [token.acceptance for token in self._guess()]
        longest, prefix_prob = self._longest, math.prod(drafted)
        return asking_value(length, self._average, prefix_prob, costs, longest, guess, stop_s) > stop_s

    def _sampled_token_pays(self, acceptance: float, average: float) -> bool:
        """Whether a token that cannot be removed pays, alone or with those that may follow."""
        costs, length = self._later_costs, len(self.tokens)
        drafted = [*(token.acceptance for token in self.tokens), acceptance]
        before, after = expected_rewards(drafted, costs)[-2:]
        on_s = asking_value(length + 1, average, math.prod(drafted), costs, self._longest)
        value_s = after - before + max(-float(costs.calls_s[length + 1]), on_s)
        return value_s >= -float(costs.calls_s[length])

    def finish(self) -> tuple[list[DraftToken], int]:
        """All that was found, no longer than the step may become, and how many tokens of it must be
        drafted."""
        if not self.offers:
            return list(self.candidate[: self.plan.costs.max_length]), 0
        is_sampled = any(token.drawn_from is not None for token in self.tokens)
        num_fixed = len(self.tokens) if is_sampled else 0
        found = [*self.tokens, *self.suffix]
        return found[: max(self.plan.costs.max_length, num_fixed)], num_fixed
