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
from outrider.policy.estimates import MEAN_CONFIDENCE_RATE, average_after
from outrider.policy.fixed import FixedPolicy, grow
from outrider.policy.objective import StepCosts, allocate
from outrider.policy.state import PolicyState, RequestState

LONGEST_DRAFT = 64
"""tokens; V(n) is measured as far"""
MAX_GUESS = 16
"""lookup tokens that a call of the draft model reads ahead"""
LONG_TEXT = 1000
"""tokens from which on it is said that costs are those of so many"""

_MIN_OBSERVED = 16
_PLAIN_INTERVAL = 8
"""Of calls without drafts, the most frequent ones, only so many are learned from once enough were seen:
learning takes a noticeable part of a small model's step."""
_TOKEN_MEMORY = 0.97
"""weight of the older tokens in λ: about the last 30 count"""


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


# What is learned from the records of a step and what had been drafted for it.


def learn_costs(state: PolicyState, records: Sequence[StepRecord], held: int) -> None:
    """What the calls of a step took, of a draft model that held so many tokens. Calls over prompts and drafts
    together tell nothing clear."""
    first, work = records[0], records[0].work
    decoding = [record for record in records if record.kind == "decode" and not record.read_tokens]
    context = sum(record.position for record in records)
    is_drafted = first.batch_tokens > len(records)
    if len(decoding) == len(records):
        is_new = state.costs.num_observed < _MIN_OBSERVED
        if is_drafted or is_new or first.step % _PLAIN_INTERVAL == 0:
            state.costs.observe(
                first.batch_tokens, first.verify_s, context=context, num_sequences=len(records)
            )
            state.draft_costs.follow(state.costs, held)
    elif not decoding:
        state.costs.observe_prefill(first.batch_tokens, first.verify_s + first.read_s, context=context)
    draft = state.draft_costs
    expected_s = [draft.call_s(n, context=held) for n in work.call_tokens]
    for n, seconds in zip(work.call_tokens, expected_s, strict=True):
        draft.observe(n, seconds * work.model_s / sum(expected_s), context=held)
    if not work.calls and first.step % _PLAIN_INTERVAL == 0:
        draft.relax(state.costs.drift)
    if work.prefill_calls:
        before = max(held - work.prefill_tokens, 0)
        draft.observe_prefill(work.prefill_tokens, work.prefill_s, context=before)
    if decoding:
        state.learn_own_time(decoding)


def plain_step_s(state: PolicyState, records: Sequence[StepRecord]) -> float | None:
    """What the step would have taken without drafts; None where prompts were read in it too."""
    if any(record.kind != "decode" or record.read_tokens for record in records):
        return None
    return state.plain_step_s(sum(record.position for record in records), len(records))


def learn_request(
    state: PolicyState,
    text: RequestState,
    draft: SequenceDraft | None,
    record: StepRecord,
    plain_s: float | None,
) -> None:
    """What became of `draft` in a decoding step of this request; `plain_s` is `plain_step_s`."""
    num_emitted, is_asked = len(record.tokens), draft is not None and draft.is_asked
    text.generated += num_emitted
    if plain_s is not None:  # what reading a prompt took says nothing about tokens
        step_s, memory = record.total_s - record.work.prefill_s, _TOKEN_MEMORY**num_emitted
        text.spent_s = text.spent_s * memory + step_s / record.num_sequences
        text.emitted = text.emitted * memory + num_emitted
        if is_asked:
            text.model_gain += num_emitted - step_s / plain_s
    _learn_drafted(state, text, draft, record)
    if draft is not None:
        _learn_lookup(state, text, draft, record)
        _learn_model(state, text, draft, record)


def _learn_drafted(
    state: PolicyState, text: RequestState, draft: SequenceDraft | None, record: StepRecord
) -> None:
    """The tokens that the target verified: the accepted ones, and the one that it replaced. Those of the
    draft model and those that lookups offered are learned below, drafted or not."""
    looked_up = [token.token for token in draft.candidate] if draft else []
    own = draft.offers[0][1].source if draft and draft.offers else None
    num_verified = record.num_accepted + (len(record.tokens) > record.num_accepted)
    is_lookup = True
    for i, token in enumerate(record.draft.items[:num_verified]):
        correct = i < record.num_accepted
        state.verified[token.source] += 1
        state.accepted[token.source] += correct
        is_lookup = is_lookup and looked_up[i : i + 1] == [token.token]
        if token.evidence and not is_lookup and token.source != own:
            estimator = state.estimator(token.source, constrained=bool(draft and draft.is_constrained))
            estimator.learn(token.evidence, text.bias(token.source), correct)


def _learn_lookup(state: PolicyState, text: RequestState, draft: SequenceDraft, record: StepRecord) -> None:
    """What lookups offered costs nothing to compare with what came, drafted or not."""
    for i, (token, came) in enumerate(zip(draft.candidate, record.tokens, strict=False)):
        correct, bias = token.token == came, text.bias(token.source)
        state.estimator(token.source, constrained=draft.is_constrained).learn(token.evidence, bias, correct)
        if i == 0:
            bias.note_first(correct)
        if not correct:
            break


def _learn_model(state: PolicyState, text: RequestState, draft: SequenceDraft, record: StepRecord) -> None:
    """What the draft model said, drafted or not, as far as it can be compared with what came."""
    for _, offer in draft.offers:
        state.mean_confidence += MEAN_CONFIDENCE_RATE * (offer.acceptance - state.mean_confidence)
    drafted = tuple(token.token for token in draft.tokens)
    for place, offer in draft.offers:
        is_sampled = offer.drawn_from is not None
        was_left_out = is_sampled and place == len(drafted)
        if place >= len(record.tokens) or drafted[:place] != record.tokens[:place] or was_left_out:
            break
        correct = place < record.num_accepted if is_sampled else offer.token == record.tokens[place]
        estimator = state.estimator(offer.source, constrained=draft.is_constrained)
        estimator.learn(offer.evidence, text.bias(offer.source), correct)
        text.confidence = average_after(text.confidence, offer.acceptance)
