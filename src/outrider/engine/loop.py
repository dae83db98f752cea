"""Sequences in, one target call a step for all of them, tokens out.

The life of a step: the policy collects drafts, the target evaluates every sequence's last token
and draft (or a chunk of its prompt) in one call, the rule keeps what stands, the tokens are
committed, the KV is rewound to them, and the step is recorded.

After each step, for every sequence that decodes: the target's stored length is the number of
committed tokens minus one, and drafters have been told exactly the committed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice, takewhile
from time import perf_counter
from typing import cast

import numpy as np

from outrider.core.contracts import Constraint, Drafter, Model, Policy, Wish
from outrider.core.data import (
    TARGET,
    Completion,
    Draft,
    FinishReason,
    Grammar,
    Logits,
    Piece,
    Request,
    Span,
    StepRecord,
    Update,
    Verdict,
)
from outrider.core.errors import ConstraintError, InputError, PromptError, RewindUnsupported, SettingError
from outrider.engine.constrained import Timed
from outrider.engine.sequence import Judged, Plan, Shared, complete
from outrider.engine.sequence import Sequence as Running
from outrider.engine.spelling import Spelled, Spelling
from outrider.policy import FixedPolicy
from outrider.sampling import LazyDistributions, RequestSampler, score_tokens, top_gap
from outrider.text import TextStream
from outrider.verify import Judge, Verifier

PREFILL_CHUNK_TOKENS = 256
"""Prompt tokens per call: enough rows to run at full speed, few enough to stay interruptible."""


class Engine:
    """Runs requests on a target model with any number of drafters.

    `drafters` are asked by `policy`; without a policy the drafts are of fixed length. A target
    that cannot rewind decodes plainly, and `notices` says so. `judge` makes each request's
    verification rule of its settings and seed, `constrain` the constraint of a request's grammar.
    `spelling` is what was learned about the target's tokens for forced text.
    """

    def __init__(
        self,
        target: Model,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        *,
        judge: Callable[[Request, int], Judge] = Verifier.of,
        constrain: Callable[[Grammar], Constraint] | None = None,
    ) -> None:
        self.target = target
        self.drafters = tuple(drafters)
        self.policy: Policy = policy or FixedPolicy()
        self._judge_of = judge
        self.constrain = constrain
        self.spelling = Spelling()
        self.notices: list[str] = []
        if self.drafters and target.rewind == "none":
            self.drafters = ()
            self.notices.append(
                f"{target.name} cannot forget tokens (recurrent or hybrid state), so a rejected draft "
                "could not be undone: decoding plainly"
            )
        self._running: list[Running] = []
        self._kept: dict[int, list[int]] = {}
        self._num_submitted = 0
        self._num_steps = 0
        self._learning_s = 0.0

    # Requests

    def submit(self, request: Request) -> int:
        """Start a request; returns its id. KV that an earlier one left is reused where it fits.

        Raises PromptError when the prompt does not fit the context, GrammarError for a grammar that
        cannot be enforced, InputError when as many requests are running as the model has sequences.
        """
        size = self.target.vocabulary.size
        if not 0 <= min(request.prompt) <= max(request.prompt) < size:
            raise PromptError("prompt", f"it has tokens outside of 0 to {size - 1}", "Tokenize it anew.")
        if len(request.prompt) >= self.target.context_length:
            raise PromptError(
                "prompt",
                f"its {len(request.prompt)} tokens do not fit a context of {self.target.context_length}",
                f"Give a context of at least {len(request.prompt) + 1} (-c), or a shorter prompt.",
            )
        constraint = self._constraint_of(request)
        slot, reused = self._take_slot(request.prompt)
        seed = request.sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        sequence = Running(
            request=request,
            id=self._num_submitted,
            slot=slot,
            tokens=list(request.prompt),
            reused_tokens=reused,
            seed=seed,
            constraint=constraint,
            sampler=RequestSampler(request.sampling, self.target.vocabulary, request.prompt, constraint),
            judge=self._judge_of(request, seed),
            text=TextStream(self.target.vocabulary, request.stop),
            started_s=perf_counter(),
        )
        for drafter in self._drafters_of(sequence):
            drafter.begin(slot, request.prompt)
        self.policy.begin(slot, len(request.prompt), request.max_tokens)
        self._num_submitted += 1
        self._running.append(sequence)  # last: interrupted before this, it holds no slot
        return sequence.id

    def _constraint_of(self, request: Request) -> Timed | None:
        if request.grammar is None:
            return None
        if self.constrain is None:
            raise SettingError("grammar", "this engine was made without constraints", "Give it `constrain`.")
        longest = min(self.target.max_batch_tokens, self.target.max_rows)
        return Timed(Spelled(self.constrain(request.grammar), self.spelling, longest))

    def _take_slot(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The free slot that shares the longest prefix with the prompt (of several the one that holds
        least), rewound to it, and how much of the prompt it then holds."""
        busy = {sequence.slot for sequence in self._running}
        free = [slot for slot in range(self.target.max_sequences) if slot not in busy]
        if not free:
            raise InputError(
                "request", f"all {self.target.max_sequences} sequences are in use", "Wait for one to end."
            )
        kept = {slot: self._kept.get(slot, []) for slot in free}
        slot = max(free, key=lambda s: (_common_prefix(kept[s], prompt), -len(kept[s])))
        # The last prompt token is always evaluated: its logits are where generation starts.
        self._kept.pop(slot, None)
        self._rewind(slot, min(_common_prefix(kept[slot], prompt), len(prompt) - 1))
        return slot, self.target.length(slot)

    def _rewind(self, slot: int, length: int) -> None:
        """Forget all but `length` tokens. A target that cannot forgets all and evaluates them anew."""
        if self.target.length(slot) > length:
            try:
                self.target.truncate(slot, length)
            except RewindUnsupported:
                self.target.truncate(slot, 0)

    def cancel(self, request_id: int) -> None:
        """Stop a running request after its last step; its KV stays for reuse."""
        for sequence in self._running:
            if sequence.id == request_id:
                sequence.finish_reason = "cancelled"
                sequence.tail = sequence.text.flush()
                self._release(sequence)
                return

    def reset(self) -> None:
        """Forget the KV that finished requests left, so that the next one starts cold."""
        for slot in self._kept:
            self.target.truncate(slot, 0)
        self._kept.clear()
        for drafter in self.drafters:
            drafter.reset()
        for sequence in self._running:
            for drafter in self._drafters_of(sequence):
                drafter.begin(sequence.slot, sequence.tokens)

    def _release(self, sequence: Running) -> None:
        self._running.remove(sequence)
        self._kept[sequence.slot] = sequence.tokens[: self.target.length(sequence.slot)]
        for drafter in self._drafters_of(sequence):
            drafter.end(sequence.slot)

    def _drafters_of(self, sequence: Running) -> tuple[Drafter, ...]:
        return self.drafters if sequence.request.speculate else ()

    # Generating

    def generate(self, request: Request) -> Completion:
        """Run one request to its end."""
        stream = self.stream(request)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return cast(Completion, end.value)

    def stream(self, request: Request) -> Generator[Update, None, Completion]:
        """Run one request and yield each step's update; the generator returns the Completion.

        Closing the generator cancels the request. Raises ConstraintError when a constrained output
        cannot go on.
        """
        request_id, num_read = self.submit(request), 0
        sequence = self._running[-1]
        try:
            while sequence.finish_reason is None or num_read < len(sequence.updates):
                if num_read == len(sequence.updates):  # else another request's stream made the step
                    self.step()
                unread = sequence.updates[num_read:]
                num_read += len(unread)
                yield from unread
        finally:
            self.cancel(request_id)
        if sequence.error is not None:
            raise sequence.error
        return complete(sequence)

    # One step

    def step(self) -> list[Update]:
        """Advance every running request by one target call; one update for each that took part.

        Raises BackendError when a model call fails; the requests stay as they were before.
        """
        if not self._running:
            return []
        shared = Shared(perf_counter() - self._learning_s)
        try:
            plans = shared.plans = self._plan(shared)
            before = perf_counter()
            rows = self.target.decode([plan.span for plan in plans])
            shared.verify_s = perf_counter() - before
            self._num_steps += 1
            # All verdicts before the first commit: bad logits leave every request as it was.
            judged = [self._judge(plan, row, shared) for plan, row in zip(plans, rows, strict=True)]
            updates = [self._settle(p, j, shared) for p, j in zip(plans, judged, strict=True)]
            self._learn(plans, updates)
            return updates
        except BaseException:
            self._restore()
            raise

    def _learn(self, plans: Sequence[Plan], updates: Sequence[Update]) -> None:
        """Let the policy see what became of the step. The time it takes belongs to the next one."""
        before = perf_counter()
        self.policy.observe({p.sequence.slot: u.record for p, u in zip(plans, updates, strict=True)})
        self._learning_s = perf_counter() - before

    def _restore(self) -> None:
        """After a failed or interrupted call: no sequence stores more than was committed."""
        for sequence in self._running:
            self._rewind(sequence.slot, len(sequence.tokens) - 1)

    def _plan(self, shared: Shared) -> list[Plan]:
        """Decoding sequences first, each with its draft; prompts share what room is left."""
        decoding = [s for s in self._running if self.target.length(s.slot) == len(s.tokens) - 1]
        alone = next((s for s in decoding if s.alone), None)
        if alone:
            return [Plan(alone, Span(alone.slot, (alone.tokens[-1],), len(alone.tokens) - 1, 1), Draft())]
        drafts = self._propose(decoding, shared)
        plans = [
            Plan(s, Span(s.slot, (s.tokens[-1], *draft.tokens), len(s.tokens) - 1, 1 + len(draft)), draft)
            for s, draft in zip(decoding, drafts, strict=True)
        ]
        room = self.target.max_batch_tokens - sum(len(plan.span.tokens) for plan in plans)
        room = min(room, PREFILL_CHUNK_TOKENS)
        for sequence in self._running:
            stored = self.target.length(sequence.slot)
            chunk = sequence.tokens[stored:-1][: max(room, 0)]
            if chunk:
                plans.append(Plan(sequence, Span(sequence.slot, tuple(chunk), stored, 0), None))
                room -= len(chunk)
        return plans

    def _propose(self, decoding: Sequence[Running], shared: Shared) -> list[Draft]:
        """One draft for each sequence, no longer than its context, its `max_tokens` and the
        batch leave room for: the target adds a token of its own to every draft."""
        before = perf_counter()
        limit = min(self.target.max_batch_tokens, self.target.max_rows)
        share = limit // max(len(decoding), 1)
        wishes: dict[int, Wish] = {}
        for sequence in decoding:
            room = min(self.target.context_length - len(sequence.tokens), share) - 1
            if sequence.num_remaining is not None:
                room = min(room, sequence.num_remaining - 1)
            if room > 0 and self._is_drafted_for(sequence):
                drawing = sequence.judge.drawing(sequence.num_generated)
                wishes[sequence.slot] = Wish(
                    sequence.slot,
                    room,
                    sequence.sampler,
                    drawing,
                    believe=sequence.judge.compares,
                    constraint=sequence.constraint,
                )
        drafts: dict[int, Draft] = {}
        if wishes:
            offers, shared.work = self.policy.propose(self.drafters, list(wishes.values()))
            drafts = dict(zip(wishes, offers, strict=True))
        shared.propose_s = perf_counter() - before
        return [drafts.get(sequence.slot, Draft()) for sequence in decoding]

    def _is_drafted_for(self, sequence: Running) -> bool:
        """What a constraint forces is drafted without any drafter."""
        forced = sequence.constraint is not None and self.target.rewind != "none"
        return sequence.request.speculate and bool(self.drafters or forced)

    # What a step leaves behind

    def _judge(self, plan: Plan, logits: Logits, shared: Shared) -> Judged:
        """The verdict on a draft; none for a chunk of the prompt."""
        if plan.draft is None:
            return Judged()
        before, sequence, draft = perf_counter(), plan.sequence, plan.draft
        rows = LazyDistributions(logits, sequence.sampler, draft.tokens)
        verdict, error = self._verdict(sequence, draft, rows, shared), None
        if rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted:
            verdict, error = Verdict(verdict.num_accepted, None, "deferred"), rows.dead_end[1]
        emitted = draft.tokens[: verdict.num_accepted]
        emitted += () if verdict.token is None else (verdict.token,)
        wanted = sequence.request.logprobs
        logprobs = () if wanted is None else score_tokens(logits, rows, emitted, wanted)
        return Judged(verdict, perf_counter() - before, logprobs, error)

    def _verdict(self, sequence: Running, draft: Draft, rows: LazyDistributions, shared: Shared) -> Verdict:
        request = sequence.request
        verdict = sequence.judge.judge(rows, draft, sequence.num_generated)
        margin = request.verification.strict_margin
        if margin and shared.batch_tokens > 1 and request.sampling.is_greedy:
            verdict = _cut_where_close(verdict, rows, margin)
        return verdict

    def _settle(self, plan: Plan, judged: Judged, shared: Shared) -> Update:
        """Commit, rewind and record one sequence's share of the step."""
        sequence, draft = plan.sequence, plan.draft
        position, pieces, error = len(sequence.tokens), list[Piece](), judged.error
        if draft is not None and judged.verdict is not None:
            try:
                pieces += self._commit(sequence, draft, judged.verdict)
            except ConstraintError as lost:  # this request is over, the others go on
                error = lost
            if error is not None and sequence.finish_reason is None:
                pieces += self._fail(sequence, error)
            sequence.alone = judged.verdict.kind == "deferred"
            self._rewind(sequence.slot, len(sequence.tokens) - 1)
            sequence.sampler.accept(sequence.tokens[position:])
            for drafter in self._drafters_of(sequence):
                drafter.observe(sequence.slot, sequence.tokens[position:])
            if sequence.finish_reason is not None:
                self._release(sequence)
        record = self._record(plan, position, judged, shared)
        sequence.updates.append(Update(record, tuple(pieces), sequence.error))
        if sequence.error is not None:
            sequence.error.text = "".join(update.text for update in sequence.updates)
            sequence.error.tokens = tuple(sequence.tokens[len(sequence.request.prompt) :])
        return sequence.updates[-1]

    def _fail(self, sequence: Running, error: ConstraintError) -> list[Piece]:
        """End a request whose constrained output cannot go on; what was produced stays."""
        sequence.error, sequence.finish_reason = error, "error"
        rest = sequence.text.flush()
        return [Piece(rest, TARGET)] if rest else []

    def _commit(self, sequence: Running, draft: Draft, verdict: Verdict) -> Iterator[Piece]:
        """Append the tokens that stand, up to where the text ends; gives what may be shown. Raises
        ConstraintError where a constraint cannot read them."""
        offered = zip(draft.tokens, draft.sources, strict=True)
        standing = list(islice(offered, verdict.num_accepted))
        if verdict.token is not None:
            standing.append((verdict.token, TARGET))
        for token, source in standing:
            if sequence.constraint is not None:
                sequence.constraint.accept((token,))
            sequence.tokens.append(token)
            if text := sequence.text.push(token):
                yield Piece(text, source)
            sequence.finish_reason = self._finish_reason(sequence, token)
            if sequence.finish_reason is not None:
                if text := sequence.text.flush():
                    yield Piece(text, source)
                if sequence.text.stopped is not None:  # only now is it certain
                    sequence.finish_reason = "stop"
                break

    def _finish_reason(self, sequence: Running, token: int) -> FinishReason | None:
        if sequence.text.stopped is not None:
            return "stop"
        if not sequence.request.ignore_end and self.target.vocabulary.ends_generation(token):
            return "stop"
        if sequence.constraint is not None and sequence.constraint.is_complete:
            return "stop"
        if sequence.num_remaining == 0:
            return "length"
        if len(sequence.tokens) >= self.target.context_length:
            return "context"
        return None

    def _record(self, plan: Plan, position: int, judged: Judged, shared: Shared) -> StepRecord:
        sequence, verdict = plan.sequence, judged.verdict
        tokens = tuple(sequence.tokens[position:])
        now = perf_counter()
        known_s = shared.propose_s + shared.verify_s + judged.sampling_s
        return StepRecord(
            request=sequence.id,
            step=self._num_steps,
            kind="prefill" if plan.draft is None else "decode",
            position=position,
            num_evaluated=len(plan.span.tokens),
            draft=plan.draft or Draft(),
            num_accepted=min(verdict.num_accepted, len(tokens)) if verdict else 0,
            tokens=tokens,
            work=shared.work,
            draft_s=shared.propose_s - shared.work.prefill_s,
            verify_s=shared.verify_s,
            sampling_s=judged.sampling_s,
            other_s=now - shared.start_s - known_s,
            end_s=now - sequence.started_s,
            num_sequences=len(shared.plans),
            batch_tokens=shared.batch_tokens,
            constraint_s=sequence.constraint.take_time() if sequence.constraint else 0.0,
            finish_reason=sequence.finish_reason,
            logprobs=judged.logprobs[: len(tokens)],
        )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _cut_where_close(verdict: Verdict, rows: LazyDistributions, margin: float) -> Verdict:
    """The verdict up to the first token whose two best logits lie closer than `margin`."""
    ends_there = rows.dead_end is not None and rows.dead_end[0] == verdict.num_accepted
    num_rows = verdict.num_accepted + (not ends_there)
    close = (i for i in range(num_rows) if top_gap(rows.row(i)) < margin)
    first = next(close, None)
    return verdict if first is None else Verdict(first, None, "deferred")
