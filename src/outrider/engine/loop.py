"""Sequences in, one target call a step for all of them, tokens out."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, cast

import numpy as np

from outrider.core.contracts import Constraint, Drafter, Drafters, DraftRequest, Model, Policy
from outrider.core.data import Completion, Draft, Grammar, Piece, Request, Update
from outrider.core.errors import ConstraintError, InputError, PromptError
from outrider.core.notices import notify
from outrider.engine.kv_slots import DraftKv, Slots, rewind
from outrider.engine.limits import PreferredTokenization, limits_of
from outrider.engine.sequence import (
    RunningRequest,
    Shared,
    StepPlan,
    Verified,
    commit,
    complete,
    decodes,
    num_missing,
    reading,
    record_of,
    unread,
    verification,
    verify,
    with_draft,
)
from outrider.engine.text import TextStream
from outrider.engine.tiers import KvTiers, Reading
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import RequestSampler
from outrider.verify import Verifier

if TYPE_CHECKING:
    from outrider.drafters.model import ModelDrafter

MAX_TOKENS = 256
"""Prompt tokens per call on a processor: enough to run at full speed, few enough to stay interruptible."""

_MIN_TOKENS = 16
"""Fewer would read a prompt no sooner: the tokens of a call share the reading of the weights."""

GAP_STEPS = 5.0
"""Where sequences decode, a step takes no longer than so many plain ones of theirs, if nothing else is asked
(benchmarks/serve)."""

_RATE = 0.3
"""weight of the last call in what is known of their times"""


class Engine:
    """Runs requests on a target model with any number of drafters.

    `drafters` are asked by `policy`; without a policy the drafts are of fixed length. `verifier` makes each
    request's verification rule from its settings and seed, `constrain` the constraint of a grammar.
    `preferred` is what was learned about the target's tokens for forced text. At most `max_running`
    requests run at once (None: as many as the target has sequences); the other sequences keep KV. Where
    several run, no step is to be longer than `max_gap_s` (`Pace`); a call reads at most `prompt_tokens` of
    prompts. `kv_store` gets KV that has to leave, `draft_kv_store` that of a draft model.
    """

    def __init__(
        self,
        target: Model,
        drafters: Sequence[Drafter] = (),
        policy: Policy | None = None,
        *,
        verifier: Callable[[Request, int], Verifier] = Verifier.of,
        constrain: Callable[[Grammar], Constraint] | None = None,
        max_running: int | None = None,
        max_gap_s: float | None = None,
        prompt_tokens: int = MAX_TOKENS,
        kv_store: KvTiers | None = None,
        draft_kv_store: KvTiers | None = None,
    ) -> None:
        self.target = target
        self.max_running = min(max_running or target.max_sequences, target.max_sequences)
        self._verifier_of = verifier
        self.constrain = constrain
        self._running: list[RunningRequest] = []
        self._draft_kv_store = draft_kv_store
        self.equip(drafters, policy)
        self.slots = Slots(target, kv_store)
        self._pace = Pace(max_gap_s, prompt_tokens)
        self._num_submitted = 0
        self._num_steps = 0
        self._learning_s = 0.0

    def equip(
        self,
        drafters: Sequence[Drafter],
        policy: Policy | None = None,
        preferred: PreferredTokenization | None = None,
    ) -> None:
        """Replace drafters and policy; the target's KV stays. The drafters must have no running request.

        Raises InputError while requests are running.
        """
        if self._running:
            raise InputError("drafters", "requests are running", "Change them when all have ended.")
        self.drafters = tuple(drafters)
        self._asked = Drafters.of(self.drafters)
        model, store = self._asked.model, self._draft_kv_store
        self._draft_kv = DraftKv(cast("ModelDrafter", model), store) if store and model else None
        self.policy: Policy = policy or FixedPolicy()
        self.preferred = preferred or PreferredTokenization()
        if self.drafters and not self.target.rewinding.is_possible:
            self.drafters, self._asked = (), Drafters()
            notify(
                f"{self.target.name} cannot forget tokens (recurrent or hybrid state), so a rejected draft "
                "could not be undone: decoding plainly"
            )

    # Requests

    def submit(self, request: Request) -> int:
        """Start a request; returns its id. KV that others of its scope left is reused where it fits.

        Raises PromptError when the prompt does not fit the context, GrammarError for a grammar that
        cannot be enforced, InputError when there is no room for another request now (`has_room`).
        """
        request, size = self.slots.as_served(request), self.target.vocabulary.size
        if not 0 <= min(request.prompt) <= max(request.prompt) < size:
            raise PromptError("prompt", f"it has tokens outside of 0 to {size - 1}", "Tokenize it again.")
        if len(request.prompt) >= self.target.context_length:
            raise PromptError(
                "prompt",
                f"its {len(request.prompt)} tokens do not fit a context of {self.target.context_length}",
                f"Give a context of at least {len(request.prompt) + 1} (-c), or a shorter prompt.",
            )
        if not self.has_room(request):
            why = f"{len(self._running)} are running, and there is no room for another"
            raise InputError("request", why, "Wait for one to end.")
        constraint, thought = limits_of(request, self.target, self.constrain, self.preferred)
        seed = request.sampling.seed
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        tokens = list(request.prompt)
        turns = self.slots.turns_of(request)
        slot = self.slots.take(request, tokens)
        try:
            sequence = RunningRequest(
                request=request,
                id=self._num_submitted,
                slot=slot,
                tokens=tokens,
                reused_tokens=self.target.length(slot),
                turns=turns,
                seed=seed,
                constraint=constraint,
                thought=thought,
                sampler=RequestSampler(request.sampling, self.target.vocabulary, request.prompt, constraint),
                verifier=self._verifier_of(request, seed),
                text=TextStream(self.target.vocabulary, request.stop, request.visible, request.reader),
                started_s=perf_counter(),
            )
            for drafter in self._drafters_of(sequence):
                drafter.begin(slot, request)
            if self._draft_kv is not None and request.speculate:
                self._draft_kv.begin(slot, request)
            self.policy.begin(slot, len(request.prompt), request.max_tokens)
        except BaseException:  # an interrupt as well: the slot must not stay taken
            self.slots.give_back(slot)
            raise
        self._num_submitted += 1
        self._running.append(sequence)
        return sequence.id

    def has_room(self, *requests: Request) -> bool:
        """Whether these requests could run beside those that are running, up to their last tokens."""
        needed = [self._most_tokens(r) for r in (*requests, *(s.request for s in self._running))]
        return len(needed) <= self.max_running and (
            len(needed) == 1 or sum(needed) <= self.target.capacity_tokens
        )

    def should_wait(self, request: Request) -> bool:
        """Whether a request had better wait for a running one that reads the same beginning, and share it."""
        return any(self.slots.will_share(other, request) for other in self._running)

    def read_ahead(self, request: Request, when_done: Callable[[], None]) -> list[Reading]:
        """Begin to read what the KV stores have on disk for a request, so that `submit` need not wait for it
        when that is done, which another thread says by `when_done`. Empty where it would not wait. The result
        is to be held until then."""
        found = [self.slots.read_ahead(request, when_done)]
        if self._draft_kv is not None and request.speculate:
            found.append(self._draft_kv.read_ahead(request, when_done))
        return [reading for reading in found if reading is not None]

    def _most_tokens(self, request: Request) -> int:
        if request.max_tokens is None:
            return self.target.context_length
        return min(len(request.prompt) + request.max_tokens, self.target.context_length)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def used_tokens(self) -> int:
        return self.slots.used_tokens

    def cancel(self, request_id: int) -> Completion | None:
        """Stop a running request after its last step; its KV stays for reuse as far as there is room to keep
        any. Returns what there is of it; None when it has ended before."""
        for sequence in self._running:
            if sequence.id == request_id:
                sequence.finish_reason = "cancelled"
                sequence.unshown = tuple(sequence.text.flush())
                self._release(sequence)
                return complete(sequence)
        return None

    def reset(self, *, texts: bool = True) -> None:
        """Forget the KV that finished requests left, so that the next one starts cold; with `texts` for good:
        the KV store and the lookups forget theirs, too. Without, the KV store gets it."""
        self.slots.clear(put_away=not texts)
        if self._draft_kv is not None:
            self._draft_kv.reset(texts=texts)
        drafters = [drafter for drafter in self.drafters if texts or not drafter.is_free]
        for drafter in drafters:
            drafter.reset()
        for sequence in self._running:
            for drafter in drafters if sequence.request.speculate else ():
                drafter.begin(sequence.slot, replace(sequence.request, prompt=tuple(sequence.tokens)))

    def keep(self) -> bool:
        """Let the KV stores have copies of what ended requests left. False where a disk did not keep up."""
        kept = [self.slots.keep(), self._draft_kv is None or self._draft_kv.keep()]
        return all(kept)

    def _release(self, sequence: RunningRequest) -> None:
        self._running.remove(sequence)
        self.slots.give_back(sequence.slot)
        for drafter in self._drafters_of(sequence):
            drafter.end(sequence.slot)

    def _drafters_of(self, sequence: RunningRequest) -> tuple[Drafter, ...]:
        return self.drafters if sequence.request.speculate else ()

    # Generating

    def generate(self, request: Request) -> Completion:
        *_, last = self.stream(request)
        return cast(Completion, last.completion)

    def stream(self, request: Request) -> Generator[Update, None, Completion]:
        """Run one request and yield each step's update; the generator returns the Completion.

        Closing the generator cancels the request. Ctrl-C is raised between steps. Raises ConstraintError
        when a constrained output cannot go on.
        """
        num_read, sequence = 0, None
        try:
            with deferred():
                self.submit(request)
                sequence = self._running[-1]
            while sequence.finish_reason is None or num_read < len(sequence.updates):
                if num_read == len(sequence.updates):  # else another request's stream made the step
                    with deferred():
                        self.step()
                unread = sequence.updates[num_read:]
                num_read += len(unread)
                yield from unread
        finally:
            if sequence is not None:
                with deferred():
                    self.cancel(sequence.id)
        if sequence.error is not None:
            raise sequence.error
        return complete(sequence)

    # One step

    def step(self, only: int | None = None) -> list[Update]:
        """Advance every running request (or `only` one) by one target call; one update for each that took
        part. A request that cannot go on ends with an error in its update, the others are unharmed.

        Raises BackendError when a model call fails; the requests stay as they were before.
        """
        running = [s for s in self._running if only is None or s.id == only]
        if not running:
            return []
        shared = Shared(perf_counter() - self._learning_s)
        try:
            plans = self._plan(running, shared)
            self.slots.make_room(shared.batch_tokens)
            before = perf_counter()
            rows = self.target.decode([plan.span for plan in plans])
            shared.verify_s = perf_counter() - before
            self._num_steps += 1
            num_read = shared.batch_tokens - shared.num_decoding - shared.num_drafted
            self._pace.note(shared.num_decoding, shared.num_drafted, num_read, shared.verify_s)
            # All verdicts before the first commit: bad logits leave every request as it was.
            verified = [verify(plan, row) for plan, row in zip(plans, rows, strict=True)]
            updates = [self._commit(p, v, shared) for p, v in zip(plans, verified, strict=True)]
            self._learn(plans, updates)
            return updates
        except BaseException:
            self._restore()
            raise

    def _learn(self, plans: Sequence[StepPlan], updates: Sequence[Update]) -> None:
        """Let the policy see what became of the step. The time it takes belongs to the next one."""
        before = perf_counter()
        self.policy.observe({p.sequence.slot: u.record for p, u in zip(plans, updates, strict=True)})
        self._learning_s = perf_counter() - before

    def _restore(self) -> None:
        """After a failed or interrupted call: no sequence stores more than was committed."""
        for sequence in self._running:
            rewind(self.target, sequence.slot, len(sequence.tokens) - 1)

    def _plan(self, running: Sequence[RunningRequest], shared: Shared) -> list[StepPlan]:
        """Decoding sequences first, then chunks of the prompts that are being read; each sequence whose next
        token comes of the call with its draft."""
        decoding = [s for s in running if decodes(self.target, s, len(running))]
        num_decoding = len(decoding) + sum(num_missing(self.target, s) for s in decoding)
        shared.num_decoding = num_decoding
        reading = self._read([s for s in running if s not in decoding], num_decoding)
        plans = [*(verification(self.target, s) for s in decoding), *reading]
        drafts = self._propose([plan for plan in plans if plan.draft is not None], plans, shared)
        plans = [with_draft(plan, drafts.get(plan.sequence.slot)) for plan in plans]
        shared.num_sequences = len(plans)
        shared.batch_tokens = sum([len(plan.span.tokens) for plan in plans])
        shared.num_drafted = sum([len(plan.draft.items) for plan in plans if plan.draft is not None])
        return plans

    def _read(self, sequences: Sequence[RunningRequest], num_decoding: int) -> list[StepPlan]:
        """The next chunks of prompts. Where others decode so many tokens, half of the batch is left for their
        drafts."""
        if not sequences:
            return []
        room = self.target.max_batch_tokens - num_decoding
        if num_decoding:
            room -= room // 2
        missing = {i: unread(self.target, s) for i, s in enumerate(sequences)}
        sizes = chunks(missing, min(room, self._pace.tokens(num_decoding)))
        spare = min(self.target.max_batch_tokens - sum(sizes.values()), self.target.max_rows) - num_decoding
        return [
            reading(self.target, sequences[i], size, spare > n) for n, (i, size) in enumerate(sizes.items())
        ]

    def _propose(
        self, decoding: Sequence[StepPlan], plans: Sequence[StepPlan], shared: Shared
    ) -> dict[int, Draft]:
        """Drafts for sequences that decode, by slot, no longer than their context, their `max_tokens` and the
        batch leave room for beside all `plans`: the target adds a token of its own to every draft."""
        before = perf_counter()
        num_tokens = sum(len(plan.span.tokens) for plan in plans)
        num_read = num_tokens - shared.num_decoding - sum(plan.reads and plan.span.rows for plan in plans)
        share = min(self.target.max_batch_tokens - num_read, self.target.max_rows) // max(len(decoding), 1)
        is_awaited = shared.num_decoding and len(self._running) > 1
        gap_s = self._pace.gap_s(shared.num_decoding) if is_awaited else None
        requests: dict[int, DraftRequest] = {}
        for plan in decoding:
            sequence = plan.sequence
            missing = num_missing(self.target, sequence)
            recomputed = 0 if plan.reads else missing
            room = min(self.target.context_length - len(sequence.tokens), share - recomputed) - 1
            room = min(room, self.target.rewinding.max_draft(missing, in_prompt=plan.reads))
            if sequence.num_remaining is not None:
                room = min(room, sequence.num_remaining - 1)
            if sequence.request.drafting.draft_max is not None:
                room = min(room, sequence.request.drafting.draft_max)
            if room > 0 and self._is_drafted_for(sequence):
                drawing = sequence.verifier.drawing(sequence.num_generated)
                requests[sequence.slot] = DraftRequest(
                    sequence.slot,
                    room,
                    sequence.sampler,
                    drawing,
                    with_mode_of=sequence.verifier.compares,
                    constraint=sequence.constraint,
                    drafting=sequence.request.drafting,
                    recomputed=recomputed if self.target.rewinding.recomputes else None,
                    max_step_s=gap_s,
                    num_unread=plan.read_tokens,
                )
        drafts: dict[int, Draft] = {}
        if requests:
            others = num_tokens - len(requests)
            offers, shared.work = self.policy.propose(self._asked, list(requests.values()), others)
            drafts = dict(zip(requests, offers, strict=True))
        shared.propose_s = perf_counter() - before
        return drafts

    def _is_drafted_for(self, sequence: RunningRequest) -> bool:
        """What a constraint forces is drafted without any drafter."""
        forced = sequence.constraint is not None and self.target.rewinding.is_possible
        return sequence.request.speculate and bool(self.drafters or forced)

    # The end of a step

    def _commit(self, plan: StepPlan, verified: Verified, shared: Shared) -> Update:
        sequence, draft = plan.sequence, plan.draft
        position, pieces, error = len(sequence.tokens), list[Piece](), verified.error
        if draft is not None and verified.verdict is not None:
            try:
                pieces += commit(sequence, draft, verified.verdict, verified.logprobs, self.target)
            except ConstraintError as lost:  # this request is over, the others go on
                error = lost
            if error is not None and sequence.finish_reason is None:
                sequence.error, sequence.finish_reason = error, "error"
                pieces += sequence.text.flush()
            rewind(self.target, sequence.slot, len(sequence.tokens) - 1)
            sequence.sampler.accept(sequence.tokens[position:])
            if sequence.thought is not None and sequence.thought.is_over:
                sequence.lift_limit()
            for drafter in self._drafters_of(sequence):
                drafter.observe(sequence.slot, sequence.tokens[position:])
            if sequence.finish_reason is not None:
                self._release(sequence)
        record = record_of(plan, self._num_steps, position, verified, shared)
        update = Update(record, tuple(pieces), sequence.error)
        sequence.updates.append(update)
        if sequence.finish_reason is not None:
            update = sequence.updates[-1] = replace(update, completion=complete(sequence))
        if isinstance(sequence.error, ConstraintError):
            sequence.error.text = "".join(update.text for update in sequence.updates)
            sequence.error.tokens = tuple(sequence.tokens[len(sequence.request.prompt) :])
        return update


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C between steps, since what a step changes it changes whole: within the block a first one is
    noted, and KeyboardInterrupt is raised at its end; a second one is raised at once.

    Only the main thread gets it; and where the program handles the signal itself, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_noted = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_noted
        if is_noted:
            raise KeyboardInterrupt
        is_noted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_noted:
            raise KeyboardInterrupt


# How prompts are read beside sequences that decode: in chunks, so that none waits long


class Pace:
    """How long a step may take where sequences wait for their next tokens, and how many prompt tokens that
    leaves room for, by what the last calls took. `max_gap_s`: the longest step; None: `GAP_STEPS` plain
    ones. A chunk of `_MIN_TOKENS` is read in any case, one of `most_tokens` at most."""

    def __init__(self, max_gap_s: float | None = None, most_tokens: int = MAX_TOKENS) -> None:
        self._max_gap_s = max_gap_s
        self._most_tokens = most_tokens
        self._token_s: float | None = None
        self._plain_s: dict[int, float] = {}
        """a plain step, by the number of tokens that are decoded in it"""

    def gap_s(self, num_decoding: int) -> float:
        """The longest that a step should take in which so many tokens are decoded; infinite as long as none
        was seen that read no prompt."""
        plain_s = self._plain_step_s(num_decoding)
        if self._max_gap_s is not None:
            return max(self._max_gap_s, plain_s or 0.0)
        return math.inf if plain_s is None else GAP_STEPS * plain_s

    def tokens(self, num_decoding: int) -> int:
        """Prompt tokens for the next call. Half of the time that it may take beyond a plain step is left for
        drafts."""
        if not num_decoding:
            return self._most_tokens
        gap_s = self.gap_s(num_decoding)
        if self._token_s is None or math.isinf(gap_s):
            return _MIN_TOKENS * 4
        added_s = (gap_s - (self._plain_step_s(num_decoding) or 0.0)) / 2
        return min(max(int(added_s / self._token_s), _MIN_TOKENS), self._most_tokens)

    def note(self, num_decoding: int, num_drafted: int, num_read: int, seconds: float) -> None:
        """A call took so long in which so many tokens were decoded plainly, and so many of drafts and of
        prompts came with them."""
        plain_s, num_added = self._plain_step_s(num_decoding) or 0.0, num_drafted + num_read
        if not num_added:
            self._plain_s[num_decoding] = _mean(self._plain_s.get(num_decoding), seconds)
        elif not num_read:  # there may be drafts in every call, and without them it takes no longer
            self._plain_s[num_decoding] = min(self._plain_s.get(num_decoding, seconds), seconds)
        elif num_added >= _MIN_TOKENS and seconds > plain_s:
            self._token_s = _mean(self._token_s, (seconds - plain_s) / num_added)

    def _plain_step_s(self, num_decoding: int) -> float | None:
        """Of that many, or of the number nearest to it that was seen."""
        if not num_decoding or not self._plain_s:
            return None
        return self._plain_s[min(self._plain_s, key=lambda seen: (abs(seen - num_decoding), seen))]


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _RATE * (now - before)


def chunks(unread: Mapping[int, int], room: int) -> dict[int, int]:
    """How many tokens of each prompt to read in one call of `room` tokens; `unread` is in the order of
    arrival.

    The oldest gets half, so that none waits for ever; the rest goes to those that are nearest to their first
    token, which makes the mean wait shortest.
    """
    shares: dict[int, int] = {}
    if room <= 0 or not unread:
        return shares
    oldest = next(iter(unread))
    if len(unread) > 1:
        shares[oldest] = min(unread[oldest], (room + 1) // 2)
        room -= shares[oldest]
    for key in sorted(unread, key=lambda k: unread[k]):
        more = min(unread[key] - shares.get(key, 0), room)
        shares[key] = shares.get(key, 0) + more
        room -= more
    return {key: shares[key] for key in unread if shares.get(key)}
