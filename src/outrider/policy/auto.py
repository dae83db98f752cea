"""The policy that decides by itself: at every step what has the most reward less cost (`objective`).

Model-free drafters (lookups, constraints) are asked first. A draft model is asked while its next token pays
for its step, after lookup tokens or before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from outrider.core.contracts import Drafters, DraftRequest
from outrider.core.data import Draft, DraftWork, StepRecord
from outrider.core.errors import SettingError
from outrider.costs import CallCosts
from outrider.policy.choice import SequenceDraft
from outrider.policy.fixed import FixedPolicy
from outrider.policy.learning import learn_costs, learn_request, plain_step_s
from outrider.policy.objective import StepCosts, allocate
from outrider.policy.rounds import grow
from outrider.policy.state import PolicyState, RequestState

LONGEST_DRAFT = 64
"""tokens; V(n) is measured as far"""
MAX_GUESS = 16
"""lookup tokens that a call of the draft model reads ahead"""
LONG_TEXT = 1000
"""tokens from which on it is said that costs are those of so many"""


class AutoPolicy:
    """Drafts from whom and as far as it pays on this machine, for this text, at this position.

    Raises SettingError for a cap out of range.

    Args:
        costs: What the target's calls cost; they go on learning from every step, as all estimates do.
        draft_costs: What the draft model's calls cost.
        free: Whether model-free drafters are asked.
        models: Whether the draft model is.
        draft_max: The most drafted tokens of a step.
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
        fixed: FixedPolicy | None = None,
    ) -> None:
        if draft_max < 0:
            raise SettingError("draft max", f"{draft_max} is negative", "Give 0 (off) or more.")
        self.state = PolicyState(costs or CallCosts(), draft_costs)
        self.free = free
        self.models = models
        self.draft_max = min(draft_max, LONGEST_DRAFT)
        self.fixed = fixed
        self.notices: list[str] = []
        """what the user should hear: why a draft model stays out"""
        self._texts: dict[int, RequestState] = {}
        self._drafts: dict[int, SequenceDraft] = {}
        self._has_said_why = False

    def begin(self, sequence: int, prompt_tokens: int, max_tokens: int | None) -> None:
        """A request starts: what was particular to the last one of the sequence is forgotten."""
        self._texts[sequence] = self.state.new_request(prompt_tokens, max_tokens)
        self._drafts.pop(sequence, None)

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
        if self.fixed is not None or request.drafting.policy != "fixed":
            return self.fixed
        length = request.drafting.draft_max
        return FixedPolicy() if length is None else FixedPolicy(draft_max=length)

    def _propose(
        self, drafters: Drafters, requests: Sequence[DraftRequest], others: int
    ) -> tuple[list[Draft], DraftWork]:
        if self.draft_max == 0:
            return [Draft()] * len(requests), DraftWork()
        drafters = Drafters(drafters.lookups if self.free else (), drafters.model if self.models else None)
        self.state.block = drafters.model.block if drafters.model is not None else 1
        drafts = [self._begun(drafters, request) for request in requests]
        may_ask = drafters.model is not None and self._model_may_pay(drafts)
        if not may_ask and not any(draft.candidate for draft in drafts):
            return [Draft()] * len(requests), DraftWork()
        texts, size = [draft.text for draft in drafts], len(drafts)
        costs, work = self.state.step_costs(texts, requests, others, self.draft_max * size), DraftWork()
        if may_ask and drafters.model is not None:
            asked = [draft for draft in drafts if self._plans(draft, costs, texts)]
            work = grow(drafters.model, asked) if asked else work
        return self._cut(drafts, costs, work), work

    def _begun(self, drafters: Drafters, request: DraftRequest) -> SequenceDraft:
        if request.sequence not in self._texts:
            self.begin(request.sequence, 1, None)
        drafters = drafters.for_request(request.drafting)
        max_guess = MAX_GUESS if drafters.model is not None and drafters.model.reads_ahead else 0
        max_length, text = min(request.max_tokens, self.draft_max), self._texts[request.sequence]
        if drafters.model is not None:
            text.draft = drafters.model.progress(request.sequence)
        draft = SequenceDraft(self.state, text, request, drafters.lookups, max_length, max_guess)
        self._drafts[request.sequence] = draft
        return draft

    def _model_may_pay(self, drafts: Sequence[SequenceDraft]) -> bool:
        """Whether the draft model's costs are known (those of the target are from the first call on), and it
        would pay if it were always correct; else that is said, once."""
        state = self.state
        if not state.costs.is_known:
            return False
        if not state.draft_costs.is_known:
            self._say_why("the draft model is not used: what its calls take was not measured here")
            return False
        sizes = [(draft.text.context, draft.text.draft.held) for draft in drafts]
        if any(state.token_ratio(context, held, 1.0) < 1 for context, held in sizes):
            return True
        context, held = max(sizes)
        share = state.draft_costs.call_s(1, context=held) / state.costs.call_s(1, context=context)
        where, of = (f" after {context:,} tokens", " for texts so long") if context >= LONG_TEXT else ("", "")
        self._say_why(
            f"the draft model is not used{of}: one of its steps takes {share:.2f} of a target step "
            f"here{where}, too much to pay even if it were always right"
        )
        return False

    def _say_why(self, line: str) -> None:
        if not self._has_said_why:
            self._has_said_why = True
            self.notices.append(line)

    def _plans(self, draft: SequenceDraft, costs: StepCosts, texts: Sequence[RequestState]) -> bool:
        """Whether a draft asks the model."""
        if draft.request.drafting.policy == "lookup":
            return False
        context, size = sum(text.context for text in texts), len(texts)
        held = sum(text.draft.held for text in texts)
        costs = self.state.with_model(costs.first(draft.max_length), draft.text, held, size, draft.max_guess)
        return draft.plan(costs, self.state.plain_step_s(context, size), size)

    def _cut(self, drafts: Sequence[SequenceDraft], costs: StepCosts, work: DraftWork) -> list[Draft]:
        """How much of what was found is drafted."""
        found = [draft.finish() for draft in drafts]
        limits_s = [draft.request.max_step_s for draft in drafts if draft.request.max_step_s is not None]
        if limits_s:
            num_fixed = sum(fixed for _, fixed in found)
            costs = costs.limited(min(limits_s) - work.model_s - work.prefill_s, num_fixed=num_fixed)
        candidates = [([token.acceptance for token in tokens], fixed) for tokens, fixed in found]
        lengths = allocate(candidates, costs)
        return [Draft(tuple(tokens[:length])) for (tokens, _), length in zip(found, lengths, strict=True)]

    def observe(self, records: Mapping[int, StepRecord]) -> None:
        """Learn what calls cost and what drafts gained."""
        if not records:
            return
        held = sum(self._texts[sequence].draft.held for sequence in records if sequence in self._texts)
        learn_costs(self.state, list(records.values()), held)
        plain_s = plain_step_s(self.state, list(records.values()))
        for sequence, record in records.items():
            if record.kind == "decode" and sequence in self._texts:
                draft = self._drafts.pop(sequence, None)
                learn_request(self.state, self._texts[sequence], draft, record, plain_s)
