"""One sequence's decisions in one step: what to draft, from whom, and how far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, TokenEstimate
from outrider.policy.forced import FORCED, forced
from outrider.policy.objective import (
    amortises_prefill,
    expected_rewards,
    exploration_budget_s,
    slowdown_budget,
    stopping_value,
)
from outrider.policy.proposal import DraftQuery, Proposal, look_up
from outrider.policy.state import (
    MAX_CONSTRAINED_MODEL_DRAFT,
    MAX_LOOKUP_PREFIX,
    MAX_MODEL_DRAFT,
    BatchState,
    PolicyState,
    RequestState,
)

_CATCH_UP_STEPS = 6
"""steps over which the cost of evaluating uncached tokens is spread, since they profit too"""
_LONG_BACKOFF, _SHORT_BACKOFF = 6, 1
"""steps for which draft models that do not pay are not evaluated"""
_MAX_REJECTED = 32
"""`PolicyState.num_rejected` from which on lookups do not end a back-off"""


class Step:
    """From the lookups' candidate to a finished draft; a draft model is asked in between where that pays.

    A sampled token is never removed. Whether another is sampled may depend on those before it, but only
    through the distributions that they were sampled from.
    """

    def __init__(
        self,
        state: PolicyState,
        text: RequestState,
        request: DraftRequest,
        lookups: Sequence[Drafter],
        max_length: int,
    ) -> None:
        self.request = request
        self.lookup_prefix = Draft()
        """lookup tokens before the draft model's"""
        self.gain_s = 0.0
        """what asking the draft model is expected to gain over not asking"""
        self._state = state
        self._text = text
        self._lookups = lookups
        self._max_length = min(request.max_tokens, max_length)
        self._max_model_draft = MAX_CONSTRAINED_MODEL_DRAFT if request.constraint else MAX_MODEL_DRAFT
        self._drafted: list[float] = []
        """the acceptance of each token of the draft so far"""
        self._average = text.average_confidence
        self._suffix_after: tuple[int, ...] = ()
        self._suffix = self._look_up(())
        """what lookups add to the draft so far"""
        self.proposal = Proposal(self._suffix, request.constraint is not None)

    def _look_up(self, prefix: tuple[int, ...]) -> Draft:
        room = self._max_length - len(prefix)
        return look_up(self._state, self._text, self._lookups, self.request, prefix, room)

    @property
    def model(self) -> str | None:
        """The draft model that is asked."""
        return self.proposal.query.model if self.proposal.query else None

    @property
    def context(self) -> int:
        """Tokens of the text so far."""
        return self._text.context

    @property
    def has_candidate(self) -> bool:
        """Whether a model-free drafter offered anything."""
        return bool(self._suffix)

    @property
    def candidate_may_pay(self) -> bool:
        """Whether the lookups' candidate may pay for a longer call, if the call is not shared."""
        return self._state.marginal_costs(self.context).may_pay(self._suffix.acceptance)

    @property
    def _num_forced(self) -> int:
        """Tokens that a constraint forces before everything else."""
        return sum(1 for _ in takewhile(lambda source: source == FORCED, self._suffix.sources))

    def set_costs(self, model: str | None, batch: BatchState) -> None:
        """Settle the costs of the step, with or without a draft model."""
        max_prefix = self._num_forced + MAX_LOOKUP_PREFIX
        self._costs = self._state.step_costs(self._text, model, self._max_length, batch, max_prefix)
        if model is not None:
            if self.request.max_step_s is not None:
                self._costs = self._costs.limited(self.request.max_step_s, batch.num_sequences)
            self._continuation = self._state.continuation_value(self._costs, self._max_model_draft)

    # Whether to ask a draft model

    def is_backing_off(self) -> bool:
        """Whether draft models need not be evaluated (which takes a while): they did not pay a moment ago and
        there is no candidate that they could confirm, or they did not pay for long."""
        if not self._text.backoff_steps or (self.has_candidate and not self._is_rejected_often):
            return False
        self._text.backoff_steps -= 1
        return True

    def back_off(self, *, can_pay: bool) -> None:
        """No draft model pays: none is evaluated for a while, longer where none can pay, or did for long."""
        self._state.num_rejected += 1
        if self._is_rejected_often or not self.has_candidate:
            is_long = self._is_rejected_often or not can_pay
            self._text.backoff_steps = _LONG_BACKOFF if is_long else _SHORT_BACKOFF

    @property
    def _is_rejected_often(self) -> bool:
        return self._state.num_rejected >= _MAX_REJECTED

    def evaluate(self) -> int:
        """After how many lookup tokens the draft model whose costs were set is best asked; `gain_s` then says
        what that gains."""
        costs, acceptance, least = self._costs, self._suffix.acceptance, self._num_forced
        rewards, best, length = expected_rewards(acceptance, costs), -math.inf, 0
        for n in range(least, min(len(acceptance), least + MAX_LOOKUP_PREFIX, costs.max_length - 1) + 1):
            average = self._average if n == 0 else self._state.confidence.mean
            on = self._continuation_value(n, average, math.prod(acceptance[:n]))
            value = rewards[n] + on
            if n == 0:
                value = max(value, self._agreement_value())
            value -= (float(costs.first_draft_s[n]) - costs.draft_step_s) / _CATCH_UP_STEPS
            if value > best:
                best, length = value, n
        self.gain_s = best - stopping_value(acceptance, costs)
        return length

    def _agreement_value(self) -> float:
        """The value of one step of the model that may agree with the lookups' candidate: equation (6)."""
        costs, drafted, suffix, known = self._costs, self._drafted, self._suffix, self._state.agreement
        if not suffix or len(drafted) >= costs.max_length:
            return -math.inf
        agreement = known.probability(suffix.acceptance[0])
        joined = [*drafted, known.if_agreed, *suffix.acceptance[1:]]
        if_agreed = stopping_value(joined, costs, len(drafted) + 1)
        if_not = stopping_value([*drafted, known.if_not], costs, len(drafted))
        return agreement * if_agreed + (1 - agreement) * if_not - costs.draft_step_s

    def _continuation_value(self, length: int, average: float, prefix_prob: float) -> float:
        """Of at least one more step of the model, in seconds."""
        return self._continuation.at(length, average, prefix_prob) * float(self._costs.calls_s[0])

    def amortises_prefill(self, model: str) -> bool:
        """Whether the gain of this and later steps repays reading the prompt for the draft model. What
        confirming a candidate gains is not expected again."""
        text = self._text
        if model in text.uncached:
            return True
        return amortises_prefill(
            self._prefill_s(model),
            gain_s=self.gain_s,
            usual_gain_s=0.0 if self.has_candidate else self.gain_s,
            generated=text.generated,
            max_tokens=text.max_tokens,
            plain_s=float(self._costs.calls_s[0]),
        )

    def _prefill_s(self, model: str) -> float:
        """What the draft model has to spend before its first token, beyond a step."""
        read_s = 0.0
        if model not in self._text.uncached:
            read_s = self._state.draft_cost(model).prefill_s(self._text.prompt_tokens)
        return read_s + float(self._costs.first_draft_s[0]) - self._costs.draft_step_s

    @property
    def is_within_budget(self) -> bool:
        """Whether the text can afford that drafts of a model go on being worse than expected."""
        text = self._text
        return slowdown_budget(text.generated, self._state.saved_steps, text.slowdown_steps) >= 0

    def may_explore(self, model: str) -> bool:
        """Whether learning how good the draft model is here is within the budget."""
        cost_s = self._prefill_s(model) + max(-self.gain_s, self._costs.draft_step_s)
        return cost_s <= exploration_budget_s(self._text.decoded_s, self._text.explored_s)

    # The draft model's turn

    def ask(self, model: str, length: int, is_exploring: bool) -> None:
        """Settle on asking the draft model after `length` lookup tokens: `request` is then to be put to
        it."""
        self._state.num_rejected //= 2
        self.lookup_prefix = self._suffix.first(length)
        tokens = self.lookup_prefix.tokens
        self.proposal.query = DraftQuery(model, tokens, is_exploring)
        self._drafted = list(self.lookup_prefix.acceptance)
        if length:
            self._average = self._state.confidence.mean
        room = min(self._costs.max_length, self._max_model_draft) - length
        self.request = replace(self.request, prefix=tokens, max_tokens=room)

    def should_continue(self, drafted: Sequence[int]) -> bool:
        """Whether another step of the model pays."""
        if not drafted:
            return True
        costs, length = self._costs, len(self._drafted)
        if length >= costs.max_length:
            return False
        self._look_up_suffix(drafted)
        min_length = 0 if self.request.draw is None else length  # sampled tokens cannot be cut
        stop = stopping_value([*self._drafted, *self._suffix.acceptance], costs, min_length)
        on = expected_rewards(self._drafted, costs)[-1]
        on += self._continuation_value(length, self._average, math.prod(self._drafted))
        return max(on, self._agreement_value()) > stop

    def _look_up_suffix(self, drafted: Sequence[int]) -> None:
        """What lookups offer after the model's tokens."""
        prefix = (*self.lookup_prefix.tokens, *drafted)
        if prefix != self._suffix_after:
            self._suffix_after, self._suffix = prefix, self._look_up(prefix)

    def accept(self, estimate: TokenEstimate) -> bool:
        """Whether the token goes into the draft. A point-mass token can still be removed later."""
        acceptance = self._acceptance(estimate, self.model or "")
        average = self._state.confidence.update(self._average, acceptance)
        if query := self.proposal.query:
            query.acceptance.append(acceptance)
            query.averages.append(self._average)
        if self.request.draw is not None and not self._sampled_token_pays(acceptance, average):
            return False
        self._average = average
        self._drafted.append(acceptance)
        return True

    def append_forced(self, drafted: Sequence[int]) -> Draft:
        """What a constraint forces after the model's tokens joins them, as far as its cost is known."""
        room = self._costs.max_length - len(self._drafted)
        draft = forced(replace(self.request, max_tokens=len(drafted) + max(room, 0)), drafted)
        for estimate in draft.estimates:
            self._drafted.append(self._acceptance(estimate, FORCED))
        return draft

    def _sampled_token_pays(self, acceptance: float, average: float) -> bool:
        """Whether a token that cannot be removed pays, alone or with those that may follow."""
        costs, length = self._costs, len(self._drafted)
        before, after = expected_rewards([*self._drafted, acceptance], costs)[-2:]
        on = self._continuation_value(length + 1, average, math.prod(self._drafted) * acceptance)
        value = after - before + max(-float(costs.calls_s[length + 1]), on)
        return value >= -float(costs.calls_s[length])

    def _acceptance(self, estimate: TokenEstimate, name: str) -> float:
        estimator = self._state.estimator(name, constrained=self.proposal.is_constrained)
        return estimator.probability(estimate, self._text.bias(name))

    # The outcome

    def finish(self, offer: Draft | None) -> tuple[Draft, int]:
        """All that was found, no longer than the step may become, and how many tokens of it must be drafted;
        `offer` is what the draft model offered."""
        offer = offer or Draft()
        if self.proposal.query is not None:
            self.proposal.query.offer = offer
            if offer.tokens:
                self._look_up_suffix(offer.tokens)
            else:  # the lookups' candidate remains
                self.lookup_prefix, self._drafted, self._suffix = Draft(), [], self.proposal.lookup
        num_fixed = len(self._drafted) if offer.probs is not None else 0
        found = self.lookup_prefix + offer + self._suffix
        found = replace(found, acceptance=(*self._drafted, *self._suffix.acceptance))
        return found.first(max(self._costs.max_length, num_fixed)), num_fixed
