"""The policy that decides by itself: at every step what has the most reward less cost (`objective`).

Model-free drafters (lookups, constraints) are asked first. A draft model is asked while its next token pays
for its step, after lookup tokens or before them: a match that the model agrees with may be taken whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.core.contracts import Drafter, DraftRequest
from outrider.core.data import Draft, DraftWork, StepRecord, TokenEstimate
from outrider.core.errors import SettingError
from outrider.costs import CallCosts
from outrider.policy.fixed import FixedPolicy
from outrider.policy.learning import learn_costs, learn_request, plain_step_s
from outrider.policy.objective import allocate, within
from outrider.policy.pretrained import PretrainedCalibration
from outrider.policy.proposal import Proposal
from outrider.policy.state import BatchState, PolicyState, RequestState
from outrider.policy.step import Step

LONGEST_DRAFT = 64
"""tokens; V(n) is measured as far"""


class AutoPolicy:
    """Drafts from whom and as far as it pays on this machine, for this text, at this position.

    `costs` are those of the target's calls, `draft_costs` those of each draft model's by the drafter's
    name; both go on learning from every step, and so do the estimates of acceptance. `free` and
    `models` switch the drafters of that kind on and off; `draft_max` caps the drafted tokens of a step.
    `prior`: what to expect of a draft model before any step (`policy.prior`).

    Raises SettingError for a cap out of range, ValueError for a damaged prior.
    """

    def __init__(
        self,
        costs: CallCosts | None = None,
        draft_costs: Mapping[str, CallCosts] | None = None,
        *,
        free: bool = True,
        models: bool = True,
        draft_max: int = LONGEST_DRAFT,
        prior: PretrainedCalibration | None = None,
    ) -> None:
        if draft_max < 0:
            raise SettingError("draft max", f"{draft_max} is negative", "Give 0 (off) or more.")
        self.knowledge = PolicyState(costs or CallCosts(), draft_costs or {})
        if prior is not None:
            self.knowledge.recall(prior)
        self.free = free
        self.models = models
        self.draft_max = draft_max
        self.notices: list[str] = []
        """what the user should hear once: a draft model that cannot pay, calls that have become slower"""
        self._texts: dict[int, RequestState] = {}
        self._proposals: dict[int, Proposal] = {}
        self._reported: set[str] = set()

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts: what was particular to the last one of the sequence is forgotten."""
        self._texts[sequence] = self.knowledge.new_request(prompt_tokens, max_tokens)
        self._proposals.pop(sequence, None)

    def propose(
        self, drafters: Sequence[Drafter], requests: Sequence[DraftRequest], others: int = 0
    ) -> tuple[list[Draft], DraftWork]:
        """One draft per request: what is expected to bring the most tokens per second, over all of them."""
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
        self, drafters: Sequence[Drafter], requests: Sequence[DraftRequest], others: int
    ) -> tuple[list[Draft], DraftWork]:
        max_length = min(self.draft_max, LONGEST_DRAFT)
        if max_length == 0:
            return [Draft() for _ in requests], DraftWork()
        lookups = [drafter for drafter in drafters if drafter.is_free and self.free]
        models = [drafter for drafter in drafters if not drafter.is_free and self.models]
        texts = [self._text(request.sequence) for request in requests]
        steps = [
            Step(self.knowledge, text, request, [d for d in lookups if request.allows(d)], max_length)
            for text, request in zip(texts, requests, strict=True)
        ]
        self._proposals.update((step.request.sequence, step.proposal) for step in steps)
        open_to_models = [step for step in steps if models and not step.is_backing_off()]
        is_alone = len(steps) == 1 and not others
        if not open_to_models and not any(
            step.candidate_may_pay if is_alone else step.has_candidate for step in steps
        ):
            return [Draft() for _ in requests], DraftWork()  # the common case of a fast model: no arithmetic
        batch = BatchState.of(texts, self.knowledge, others, requests)
        for step in open_to_models:
            self._choose_model(step, models, batch)
            if step.lookup_prefix:
                batch = replace(batch, others=batch.others + len(step.lookup_prefix))
        if not any(step.has_candidate or step.model for step in steps):
            return [Draft() for _ in requests], DraftWork()
        for step in steps:
            if step.model is None:
                step.set_costs(None, batch)
        offers, work = _ask(models, steps)
        found = [step.finish(offers.get(step.request.sequence)) for step in steps]
        batch = BatchState.of(texts, self.knowledge, others, requests)
        calls_s = self.knowledge.calls_s(sum(len(draft) for draft, _ in found), batch)
        candidates = [(draft.acceptance, fixed) for draft, fixed in found]
        reread_s = self.knowledge.reread_s(calls_s, batch)
        max_step_s = min((r.max_step_s for r in requests if r.max_step_s is not None), default=math.inf)
        max_call_s = max_step_s - work.model_s - work.prefill_s
        calls_s = within(calls_s, max_call_s, sum(fixed for _, fixed in found))
        lengths = allocate(candidates, calls_s, batch.reward_s, reread_s)
        return [draft.first(length) for (draft, _), length in zip(found, lengths, strict=True)], work

    def _text(self, sequence: int) -> RequestState:
        if sequence not in self._texts:
            self.begin(sequence, 1, None)
        return self._texts[sequence]

    def _choose_model(self, step: Step, models: Sequence[Drafter], batch: BatchState) -> None:
        """Settle which draft model this sequence asks, and how, or that it asks none."""
        best: tuple[float, str, int, bool] | None = None
        can_pay = True
        for model in models:
            if not step.request.allows(model) or not self._is_known(model.name):
                continue
            step.set_costs(model.name, batch)
            length = step.evaluate()
            pays = step.gain_s > 0 and step.amortises_prefill(model.name) and step.is_within_budget
            can_pay = pays or self._can_pay(model.name, step)
            is_exploring = not pays and can_pay and step.may_explore(model.name)
            if (pays or is_exploring) and (best is None or step.gain_s > best[0]):
                best = (step.gain_s, model.name, 0 if is_exploring else length, is_exploring)
        if best is None:
            step.back_off(can_pay=can_pay)
            return
        step.set_costs(best[1], batch)
        step.ask(*best[1:])

    def _is_known(self, model: str) -> bool:
        """Whether the costs of calls are known: those of the target are from the first one on."""
        if self.knowledge.costs.is_known and not self.knowledge.draft_cost(model).is_known:
            self._say_once(model, f"{model}: what its calls take was not measured here, so it is not asked")
        return self.knowledge.costs.is_known and self.knowledge.draft_cost(model).is_known

    def _can_pay(self, model: str, step: Step) -> bool:
        """Whether a draft model would pay here if it were always correct; else that is reported."""
        if self.knowledge.can_pay(model, step.context):
            return True
        draft_s = self.knowledge.draft_cost(model).call_s(1, context=0)
        share = draft_s / self.knowledge.costs.call_s(1, context=0)
        self._say_once(
            model,
            f"{model}: a step of it takes {share:.2f} of a target step here, too much to pay even if it were "
            "always right: it stays out",
        )
        return False

    def _say_once(self, about: str, line: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            self.notices.append(line)

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Learn what calls cost and what drafts gained."""
        if not records:
            return
        learn_costs(self.knowledge, list(records.values()))
        plain_s = plain_step_s(self.knowledge, list(records.values()))
        for sequence, record in records.items():
            if record.kind == "decode" and sequence in self._texts:
                proposal = self._proposals.pop(sequence, Proposal())
                learn_request(self.knowledge, self._texts[sequence], proposal, record, plain_s)
        for costs in (self.knowledge.costs, *self.knowledge.draft_costs.values()):
            if notice := costs.notice():
                self.notices.append(notice)


def _fixed(request: DraftRequest) -> FixedPolicy:
    """The policy of a request that asked for drafts of a fixed length."""
    length = request.drafting.draft_max
    return FixedPolicy() if length is None else FixedPolicy(draft_max=length)


def _ask(models: Sequence[Drafter], steps: Sequence[Step]) -> tuple[dict[int, Draft], DraftWork]:
    """The offer of each sequence's draft model, and what they cost together."""
    offers: dict[int, Draft] = {}
    work = DraftWork()
    for model in models:
        if asking := [step for step in steps if step.model == model.name]:
            drafts, cost = model.propose([step.request for step in asking], _StepRule(asking))
            work += cost
            offers.update(zip((step.request.sequence for step in asking), drafts, strict=True))
    return offers, work


class _StepRule:
    """The StoppingRule of a draft model: each sequence's own step decides."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = {step.request.sequence: step for step in steps}

    def should_continue(self, request: DraftRequest, drafted: Sequence[int]) -> bool:
        return self._steps[request.sequence].should_continue(drafted)

    def accept(self, request: DraftRequest, drafted: Sequence[int], estimate: TokenEstimate) -> bool:
        del drafted
        return self._steps[request.sequence].accept(estimate)

    def append_forced(self, request: DraftRequest, drafted: Sequence[int]) -> Draft:
        return self._steps[request.sequence].append_forced(drafted)
