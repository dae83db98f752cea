"""The policy that decides by itself: at every step what has the most reward less cost (`objective`).

Model-free drafters (lookups, constraints) are asked first. A draft model is asked while its next token pays
for its step, after lookup tokens or before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.core.contracts import Drafters, DraftRequest
from outrider.core.data import Draft, DraftToken, DraftWork, StepRecord
from outrider.core.errors import SettingError
from outrider.costs import CallCosts
from outrider.policy.choice import Asking, ModelDraft, plan_model
from outrider.policy.fixed import FixedPolicy
from outrider.policy.learning import Proposal, learn_costs, learn_request, plain_step_s
from outrider.policy.objective import allocate, within
from outrider.policy.pretrained import PretrainedCalibration
from outrider.policy.rounds import grow
from outrider.policy.state import MAX_GUESS, BatchState, PolicyState, RequestState

LONGEST_DRAFT = 64
"""tokens; V(n) is measured as far"""


class AutoPolicy:
    """Drafts from whom and as far as it pays on this machine, for this text, at this position.

    Raises SettingError for a cap out of range, ValueError for a damaged prior.

    Args:
        costs: What the target's calls cost; they go on learning from every step, as all estimates do.
        draft_costs: What the draft model's calls cost.
        free: Whether model-free drafters are asked.
        models: Whether the draft model is.
        draft_max: The most drafted tokens of a step.
        prior: What to expect of the draft model before any step (`policy.pretrained`).
        fixed: Lengths that are drafted in any case; costs and acceptance are learned all the same.
    """

    def __init__(
        self,
        costs: CallCosts | None = None,
        draft_costs: CallCosts | None = None,
        *,
        free: bool = True,
        models: bool = True,
        draft_max: int = LONGEST_DRAFT,
        prior: PretrainedCalibration | None = None,
        fixed: FixedPolicy | None = None,
    ) -> None:
        if draft_max < 0:
            raise SettingError("draft max", f"{draft_max} is negative", "Give 0 (off) or more.")
        self.state = PolicyState(costs or CallCosts(), draft_costs)
        if prior is not None:
            self.state.recall(prior)
        self.free = free
        self.models = models
        self.draft_max = draft_max
        self.fixed = fixed
        self.notices: list[str] = []
        """what the user should hear once: a draft model that cannot pay, calls that have become slower"""
        self._texts: dict[int, RequestState] = {}
        self._proposals: dict[int, Proposal] = {}
        self._has_said_why = False

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts: what was particular to the last one of the sequence is forgotten."""
        self._texts[sequence] = self.state.new_request(prompt_tokens, max_tokens)
        self._proposals.pop(sequence, None)

    def propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request: what is expected to bring the most tokens per second, over all of them."""
        if self.fixed is not None:
            return self.fixed.propose(drafters, requests)
        by_length = [request for request in requests if request.drafting.policy == "fixed"]
        if not by_length:
            return self._propose(drafters, requests, others)
        free_choice = [request for request in requests if request.drafting.policy != "fixed"]
        offers, work = self._propose(drafters, free_choice, others + len(by_length))
        drafts = dict(zip((request.sequence for request in free_choice), offers, strict=True))
        for request in by_length:
            [drafts[request.sequence]], cost = _fixed(request).propose(drafters, [request])
            work += cost
        return [drafts[request.sequence] for request in requests], work

    def _propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int
    ) -> tuple[list[Draft], DraftWork]:
        max_length = min(self.draft_max, LONGEST_DRAFT)
        nothing = [Draft() for _ in requests]
        if max_length == 0 or not requests:
            return nothing, DraftWork()
        drafters = Drafters(drafters.lookups if self.free else (), drafters.model if self.models else None)
        self.state.block = drafters.model.block if drafters.model is not None else 1
        asking = [self._asking(drafters, request, max_length) for request in requests]
        candidates = [each.look_up() for each in asking]
        for each, candidate in zip(asking, candidates, strict=True):
            self._proposals[each.request.sequence] = Proposal(candidate, each.is_constrained)
        may_ask = drafters.model is not None and self._model_may_pay(asking)
        if not may_ask and not self._candidates_may_pay(asking, candidates, others):
            return nothing, DraftWork()  # the common case of a fast model: no arithmetic
        texts = [each.text for each in asking]
        batch, growing = BatchState.of(texts, self.state, others, requests), dict[int, ModelDraft]()
        if may_ask and drafters.model is not None:
            growing = self._growing(asking, candidates, batch)
        work = DraftWork()
        if growing and drafters.model is not None:
            work = grow(drafters.model, list(growing.values()))
        found = []
        for each, candidate in zip(asking, candidates, strict=True):
            draft = growing.get(each.request.sequence)
            found.append(draft.finish() if draft else (candidate, 0))
            self._proposals[each.request.sequence] = Proposal(candidate, each.is_constrained, draft)
        return self._cut(found, requests, batch, work), work

    def _asking(self, drafters: Drafters, request: DraftRequest, max_length: int) -> Asking:
        if request.sequence not in self._texts:
            self.begin(request.sequence, 1, None)
        lookups = drafters.for_request(request.drafting).lookups
        text = self._texts[request.sequence]
        max_guess = MAX_GUESS if drafters.model is not None and drafters.model.reads_ahead else 0
        return Asking(self.state, text, request, lookups, min(request.max_tokens, max_length), max_guess)

    def _candidates_may_pay(
        self, asking: Sequence[Asking], candidates: Sequence[Sequence[DraftToken]], others: int
    ) -> bool:
        if len(asking) > 1 or others:
            return any(candidates)
        marginal = self.state.marginal_costs(asking[0].text.context)
        return marginal.may_pay([token.acceptance for token in candidates[0]])

    def _model_may_pay(self, asking: Sequence[Asking]) -> bool:
        """Whether the draft model's costs are known (those of the target are from the first call on), and it
        would pay if it were always correct; else that is said, once."""
        state = self.state
        if not state.costs.is_known:
            return False
        if not state.draft_costs.is_known:
            self._say_why("the draft model is not used: what its calls take was not measured here")
            return False
        if any(state.model_can_pay(each.text.context) for each in asking):
            return True
        share = state.draft_costs.call_s(1, context=0) / state.costs.call_s(1, context=0)
        self._say_why(
            f"the draft model is not used: one of its steps takes {share:.2f} of a target step here, too "
            "much to pay even if it were always right"
        )
        return False

    def _say_why(self, line: str) -> None:
        if not self._has_said_why:
            self._has_said_why = True
            self.notices.append(line)

    def _growing(
        self, asking: Sequence[Asking], candidates: Sequence[Sequence[DraftToken]], batch: BatchState
    ) -> dict[int, ModelDraft]:
        """The drafts that the draft model is asked to extend, by sequence."""
        found = {}
        for each, candidate in zip(asking, candidates, strict=True):
            if each.request.drafting.policy == "lookup":
                continue
            plan = plan_model(each, candidate, batch)
            if plan is not None:
                draft = found[each.request.sequence] = ModelDraft(each, plan, candidate)
                batch = replace(batch, others=batch.others + draft.num_forced)
        return found

    def _cut(
        self,
        found: Sequence[tuple[Sequence[DraftToken], int]],
        requests: Sequence[DraftRequest],
        batch: BatchState,
        work: DraftWork,
    ) -> list[Draft]:
        """How much of what was found is drafted; each comes with the number of tokens that must be."""
        calls_s = self.state.calls_s(sum(len(tokens) for tokens, _ in found), batch)
        recompute_s = self.state.recompute_s(calls_s, batch)
        max_step_s = min((r.max_step_s for r in requests if r.max_step_s is not None), default=math.inf)
        max_call_s = max_step_s - work.model_s - work.prefill_s
        calls_s = within(calls_s, max_call_s, sum(fixed for _, fixed in found))
        candidates = [([token.acceptance for token in tokens], fixed) for tokens, fixed in found]
        lengths = allocate(candidates, calls_s, batch.reward_s, recompute_s)
        return [Draft(tuple(tokens[:length])) for (tokens, _), length in zip(found, lengths, strict=True)]

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Learn what calls cost and what drafts gained."""
        if not records:
            return
        learn_costs(self.state, list(records.values()))
        plain_s = plain_step_s(self.state, list(records.values()))
        for sequence, record in records.items():
            if record.kind == "decode" and sequence in self._texts:
                proposal = self._proposals.pop(sequence, Proposal())
                learn_request(self.state, self._texts[sequence], proposal, record, plain_s)
        for costs in (self.state.costs, self.state.draft_costs):
            if notice := costs.notice():
                self.notices.append(notice)


def _fixed(request: DraftRequest) -> FixedPolicy:
    """The policy of a request that asked for drafts of a fixed length."""
    length = request.drafting.draft_max
    return FixedPolicy() if length is None else FixedPolicy(draft_max=length)
