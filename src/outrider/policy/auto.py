"""The policy that decides by itself: at every step what has the most reward less cost (`objective`).

Model-free drafters (lookups, constraints) are asked first. A draft model is asked while its next token pays
for its step, after lookup tokens or before them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile

from outrider.core.contracts import Drafters, DraftInput, DraftRequest, Lookup
from outrider.core.data import Draft, DraftToken, DraftWork, StepRecord
from outrider.core.params import Drafting
from outrider.costs import CallCosts
from outrider.policy.fixed import FORCED, FixedPolicy, forced, grow, ids, permitted
from outrider.policy.objective import (
    MAX_MODEL_DRAFT,
    StepCosts,
    allocate,
    asking_value,
    best_guess,
    expected_rewards,
    repays,
    stopping_value,
)
from outrider.policy.state import (
    GAIN_RATE,
    MEAN_CONFIDENCE_RATE,
    Estimator,
    PolicyState,
    RequestBias,
    RequestState,
    average_after,
    confirmed,
    refused,
)

LONGEST_DRAFT = 64  # tokens; V(n) is measured as far
MAX_GUESS = 16  # lookup tokens that a call of the draft model reads ahead
_TOKEN_MEMORY = 0.97  # weight of the older tokens in λ: about the last 30 count
_MAX_CONSTRAINED_DRAFT = 40  # tokens of a draft with the draft model, where a constraint forces some
_MIN_USEFUL_PROB = 0.01  # prefix acceptance probability below which lookup tokens are not looked for
_CATCH_UP_STEPS = 10  # steps over which the cost of evaluating unread tokens is spread, since they profit too
_WITHOUT_MODEL = 0.9  # what a token takes without the draft model, in plain steps: lookups go on
MAX_LOSS = 4.0
"""Plain steps that a text may lose to a draft model whose estimates turn out wrong; a good one has gained
more by then. …"""
EXPLORATION_SHARE = 0.02
"""… A model that is expected to lose is asked to learn how good it is, for as much of a text's steps."""


class SequenceDraft:
    """A draft under construction (`fixed.Growing`), of at most `max_length` tokens. A call of the draft model
    reads ahead up to `max_guess` tokens that lookups offer: where both say the same the token is confirmed,
    and where they differ the likelier is taken."""

    def __init__(
        self,
        state: PolicyState,
        text: RequestState,
        request: DraftRequest,
        lookups: Sequence[Lookup],
        max_length: int,
        max_guess: int,
    ) -> None:
        self.state, self.text, self.request, self.lookups = state, text, request, lookups
        self.max_length, self.max_guess = max_length, max_guess
        self.is_asked = False  # whether the draft model is
        self.candidate = self._look_up()  # what lookups offer
        num_forced = sum(1 for _ in takewhile(lambda token: token.source == FORCED, self.candidate))
        # What is drafted before the draft model's next token, with calibrated estimates; what lookups add.
        self.tokens, self.suffix = self.candidate[:num_forced], self.candidate[num_forced:]
        self.offers: list[tuple[int, DraftToken]] = []
        """what the model offered, taken or not, with its place in the draft and its calibrated estimate"""
        self._average = text.confidence
        self._costs: StepCosts
        self._input = DraftInput(())

    def _estimator(self, source: str) -> tuple[Estimator, RequestBias]:
        is_constrained = self.request.constraint is not None
        return self.state.estimator(source, constrained=is_constrained), self.text.biases[source]

    def _calibrated(self, token: DraftToken) -> DraftToken:
        estimator, bias = self._estimator(token.source)
        return token._replace(acceptance=estimator.probability(token.evidence, bias))

    # Lookups

    def _forced(self, drafted: Sequence[int]) -> list[DraftToken]:
        return [self._calibrated(token) for token in forced(self.request, drafted)]

    def _look_up(self, drafted: Sequence[int] = ()) -> list[DraftToken]:
        """What follows `drafted`: what a constraint forces, of the lookups the offer with the most expected
        tokens, and what is forced after it."""
        limit = self.max_length - len(drafted)
        if limit <= 0:
            return []
        found = self._forced(drafted)[:limit]
        so_far, most, best = (*drafted, *ids(found)), 0.0, list[DraftToken]()
        for lookup in self.lookups:
            expected, offer = self._offer(lookup, so_far, limit - len(found), math.prod(_acceptance(found)))
            if expected > most:
                most, best = expected, offer
        if best:
            found += best
            found += self._forced((*so_far, *ids(best)))[: limit - len(found)]
        return found

    def _offer(
        self, lookup: Lookup, drafted: Sequence[int], limit: int, prefix_prob: float
    ) -> tuple[float, list[DraftToken]]:
        """A lookup's expected tokens and its offer, as far as it is useful."""
        found, prefix_probs = list[DraftToken](), list[float]()
        if prefix_prob >= _MIN_USEFUL_PROB:
            for token in islice(lookup.propose(self.request.sequence, drafted), limit):
                found.append(self._calibrated(token))
                prefix_prob *= found[-1].acceptance
                prefix_probs.append(prefix_prob)
                if prefix_prob < _MIN_USEFUL_PROB:
                    break
        allowed = permitted(self.request, drafted, found)
        return sum(prefix_probs[: len(allowed)]), allowed

    # Whether to ask the draft model

    def plan(self, costs: StepCosts, held: int) -> bool:
        """Whether the draft model, which holds so many tokens of all sequences, is asked in this step: where
        it is expected to gain and its reading of the prompt is repaid; else to learn how good it is, for a
        small loss."""
        if self.request.drafting.policy == "lookup":
            return False
        costs = replace(costs, calls_s=costs.calls_s[: self.max_length + 1])
        costs = self.state.with_model(costs, self.text, held, self.max_guess)
        if self.request.max_step_s is not None:
            costs = costs.limited(self.request.max_step_s, num_sequences=costs.num_sequences)
        self._costs, text, plain_s = costs, self.text, costs.plain_s
        if len(self.tokens) >= self._longest:
            return False
        read_s = float(costs.first_draft_s[0]) - costs.draft_step_s
        gain_s = self._gain_s(costs) - read_s / _CATCH_UP_STEPS
        is_repaid = True
        if unread := text.draft.unread_prompt:
            without_s = _WITHOUT_MODEL * plain_s / costs.num_sequences
            saved_s = self._gain_s(replace(costs, reward_s=without_s))
            before = text.draft.held - text.draft.unread - unread
            read_s += self.state.draft_costs.prefill_s(unread, context=before)
            left, usual = text.max_tokens - text.generated, self.state.usual_gain
            is_repaid = repays(read_s, saved_s, text.generated, left, plain_s, usual)
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
        is_free = self.request.constraint is None
        return self._costs.longest(MAX_MODEL_DRAFT if is_free else _MAX_CONSTRAINED_DRAFT)

    def _guess(self, costs: StepCosts) -> list[DraftToken]:
        most = min(self.max_guess, self._longest - len(self.tokens) - 1)
        if not self.suffix or not most:
            return []
        return self.suffix[: best_guess(_acceptance(self.suffix), costs, most)]

    # What the draft model says

    def next_input(self) -> DraftInput:
        self._input = DraftInput(ids(self.tokens), ids(self._guess(self._costs)))
        return self._input

    def take(self, offers: Iterable[DraftToken]) -> bool:
        (drafted, guess), num_offered, is_block = self._input, len(self.offers), self.state.block > 1
        if is_block:  # what its first call drafted is paid for
            self._costs = replace(self._costs, draft_step_s=0.0)
        for place, offer in enumerate(offers):
            if ids(self.tokens) != (*drafted, *guess[:place]):
                break  # the draft has left the guess
            if not self._add(offer):
                return False
        if len(self.offers) == num_offered:
            return False
        if is_block and self.request.draw is None:  # it costs nothing to look at what can be cut
            return math.prod(_acceptance(self.tokens)) >= _MIN_USEFUL_PROB
        return self._gain_s(self._costs) > 0

    def _add(self, offer: DraftToken) -> bool:
        """Add a token of the model's, and what is forced after it; whether more may follow."""
        offer = self._calibrated(offer)
        average = average_after(self._average, offer.acceptance)
        self.offers.append((len(self.tokens), offer))
        if offer.drawn_from is not None and not self._sampled_token_pays(offer.acceptance, average):
            return False
        self._average = average
        chosen, guessed = self._chosen(offer), self.suffix[:1]
        self.tokens.append(chosen)
        more = self._forced(ids(self.tokens))[: max(self._costs.max_length - len(self.tokens), 0)]
        self.tokens += more
        is_guessed = not more and ids(guessed) == (chosen.token,)
        self.suffix = self.suffix[1:] if is_guessed else self._look_up(ids(self.tokens))
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
        """Whether one more pays, alone or with those that may follow."""
        costs, length = self._costs, len(self.tokens)
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

    # Learning

    def learn(self, record: StepRecord) -> None:
        """What was offered, drafted or not, is compared with what came, which costs nothing."""
        drafted, candidate = record.draft.tokens, ids(self.candidate)
        own = self.offers[0][1].source if self.offers else None
        behind = [  # what lookups added to the model's tokens
            (i, token)
            for i, token in enumerate(record.draft.items)
            if token.evidence and token.source != own and drafted[: i + 1] != candidate[: i + 1]
        ]
        self._learn_offers(record, behind, drafted)
        self._learn_offers(record, list(enumerate(self.candidate)), candidate)
        state, text = self.state, self.text
        for _, offer in self.offers:
            state.mean_confidence += MEAN_CONFIDENCE_RATE * (offer.acceptance - state.mean_confidence)
        num_seen = self._learn_offers(record, self.offers, ids(self.tokens))
        for _, offer in self.offers[:num_seen]:
            text.confidence = average_after(text.confidence, offer.acceptance)

    def _learn_offers(
        self, record: StepRecord, offers: Sequence[tuple[int, DraftToken]], before: tuple[int, ...]
    ) -> int:
        """Of offers at these places after the first tokens of `before`: how many could be compared."""
        for number, (place, offer) in enumerate(offers):
            is_sampled = offer.drawn_from is not None
            was_left_out = is_sampled and place == len(before)
            if place >= len(record.tokens) or before[:place] != record.tokens[:place] or was_left_out:
                return number
            correct = place < record.num_accepted if is_sampled else offer.token == record.tokens[place]
            estimator, bias = self._estimator(offer.source)
            estimator.learn(offer.evidence, bias, correct)
            if place == 0:
                bias.note_first(correct)
        return len(offers)


def _acceptance(tokens: Iterable[DraftToken]) -> list[float]:
    return [token.acceptance for token in tokens]


class AutoPolicy:
    """Drafts from whom and as far as it pays on this machine, for this text, at this position.

    Args:
        costs: What the target's calls cost; they go on learning from every step, as all estimates do.
        draft_costs: What the draft model's calls cost.
        limits: Who may draft, and the most drafted tokens of a step; or lengths that are drafted in any case,
            while costs are learned all the same.
    """

    def __init__(
        self,
        costs: CallCosts | None = None,
        draft_costs: CallCosts | None = None,
        limits: Drafting | FixedPolicy | None = None,
    ) -> None:
        self.state = PolicyState(costs or CallCosts(), draft_costs)
        self.limits = limits or Drafting()
        most = self.limits.draft_max
        self.draft_max = LONGEST_DRAFT if most is None else min(most, LONGEST_DRAFT)
        self.notices: list[str] = []  # what the user should hear: why a draft model stays out
        self._texts: dict[int, RequestState] = {}
        self._drafts: dict[int, SequenceDraft] = {}

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts: what was particular to the last one of the sequence is forgotten."""
        if (last := self._texts.get(sequence)) and last.model_gain:
            self.state.usual_gain += GAIN_RATE * (last.model_gain - self.state.usual_gain)
        self._texts[sequence] = self.state.new_request(prompt_tokens, max_tokens)
        self._drafts.pop(sequence, None)

    # Choosing

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request: what is expected to bring the most tokens per second, over all of them; for
        those of fixed lengths what these say."""
        groups: defaultdict[FixedPolicy | None, list[DraftRequest]] = defaultdict(list)
        for request in requests:
            groups[self._fixed(request)].append(request)
        drafts, work = dict[int, Draft](), DraftWork()
        for fixed, group in groups.items():
            beside = others + len(requests) - len(group)
            found, cost = (fixed.propose if fixed else self._propose)(drafters, group, beside)
            drafts |= {request.sequence: draft for request, draft in zip(group, found, strict=True)}
            work += cost
        return [drafts[request.sequence] for request in requests], work

    def _fixed(self, request: DraftRequest) -> FixedPolicy | None:
        """What sets the length of a request's drafts, if anything does."""
        if isinstance(self.limits, FixedPolicy):
            return self.limits
        if "fixed" not in (self.limits.policy, request.drafting.policy):
            return None
        length = request.drafting.draft_max
        return FixedPolicy() if length is None else FixedPolicy(draft_max=length)

    def _propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int
    ) -> tuple[list[Draft], DraftWork]:
        if self.draft_max == 0:
            return [Draft()] * len(requests), DraftWork()
        assert isinstance(self.limits, Drafting), "lengths that are set need no choice"
        drafters, work = drafters.for_request(self.limits), DraftWork()
        model = drafters.model
        self.state.block = model.block if model is not None else 1
        drafts = [self._begun(drafters, request) for request in requests]
        texts = [draft.text for draft in drafts]
        may_ask = model is not None and self._model_may_pay(texts)
        if not may_ask and not any(draft.candidate for draft in drafts):
            return [Draft()] * len(requests), work
        costs = self.state.step_costs(texts, requests, others, self.draft_max * len(drafts))
        if may_ask and model is not None:
            held = sum(text.draft.held for text in texts)
            asked = [draft for draft in drafts if draft.plan(costs, held)]
            work = grow(model, asked) if asked else work
        return self._cut(drafts, costs, work), work

    def _begun(self, drafters: Drafters, request: DraftRequest) -> SequenceDraft:
        text, drafters = self._texts[request.sequence], drafters.for_request(request.drafting)
        max_length, max_guess = min(request.max_tokens, self.draft_max), 0
        if drafters.model is not None:
            text.draft = drafters.model.progress(request.sequence)
            max_guess = MAX_GUESS if drafters.model.reads_ahead else 0
        draft = SequenceDraft(self.state, text, request, drafters.lookups, max_length, max_guess)
        self._drafts[request.sequence] = draft
        return draft

    def _model_may_pay(self, texts: Sequence[RequestState]) -> bool:
        """Whether the draft model's costs are known (those of the target are from the first call on), and it
        would pay if it were always correct; else that is said, once."""
        state, why = self.state, "the draft model is not used: what its calls take was not measured here"
        if not state.costs.is_known:
            return False
        if state.draft_costs.is_known:
            sizes = [(text.context, text.draft.held) for text in texts]
            if any(state.token_ratio(context, held, 1.0) < 1 for context, held in sizes):
                return True
            context, held = max(sizes)
            share = state.draft_costs.call_s(1, context=held) / state.costs.call_s(1, context=context)
            why = (
                f"the draft model is not used: after {context:,} tokens one of its steps takes {share:.2f} "
                "of a target step here, too much to pay even if it were always right"
            )
        self.notices = self.notices or [why]
        return False

    def _cut(self, drafts: Sequence[SequenceDraft], costs: StepCosts, work: DraftWork) -> list[Draft]:
        found = [draft.finish() for draft in drafts]
        limits_s = [draft.request.max_step_s for draft in drafts if draft.request.max_step_s is not None]
        if limits_s:
            num_fixed = sum(fixed for _, fixed in found)
            costs = costs.limited(min(limits_s) - work.model_s - work.prefill_s, num_fixed=num_fixed)
        lengths = allocate([(_acceptance(tokens), fixed) for tokens, fixed in found], costs)
        return [Draft(tuple(tokens[:length])) for (tokens, _), length in zip(found, lengths, strict=True)]

    # Learning

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        if not records:
            return
        steps, plain_s = list(records.values()), 0.0
        # An engine elsewhere stands for what it does not know by a sequence that never began.
        held = sum(self._texts[sequence].draft.held for sequence in records if sequence in self._texts)
        self.state.learn_costs(steps, held)
        if all(record.kind == "decode" and not record.read_tokens for record in steps):
            plain_s = self.state.plain_step_s(sum(record.position for record in steps), len(steps))
        for sequence, record in records.items():
            if record.kind == "decode":
                self._learn(self._texts[sequence], self._drafts.pop(sequence, None), record, plain_s)

    def _learn(
        self, text: RequestState, draft: SequenceDraft | None, record: StepRecord, plain_s: float
    ) -> None:
        """What a decoding step brought. `plain_s` is what it would have taken without drafts; 0 where prompts
        were read in it too, which says nothing about tokens."""
        num_emitted = len(record.tokens)
        text.generated += num_emitted
        if plain_s:
            step_s, memory = record.total_s - record.work.prefill_s, _TOKEN_MEMORY**num_emitted
            text.spent_s = text.spent_s * memory + step_s / record.num_sequences
            text.emitted = text.emitted * memory + num_emitted
            if draft is not None and draft.is_asked:
                text.model_gain += num_emitted - step_s / plain_s
        # The target verified those of accepted tokens, and of the one it replaced.
        sources, num_accepted = record.draft.sources, record.num_accepted
        self.state.verified.update(sources[: num_accepted + (num_emitted > num_accepted)])
        self.state.accepted.update(sources[:num_accepted])
        if draft is not None:
            draft.learn(record)
