"""Drafts from a second, cheaper model.

The draft model keeps the KV of everything that was accepted, so no token is evaluated by it
twice: of a draft d1 … dn it has evaluated d1 … dn-1, and whatever of them became final stays.
Rounds that it sits out cost nothing; it catches up, in one batch, when it is next asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from outrider.core.contracts import DraftRequest, Model, StoppingRule
from outrider.core.data import (
    Distribution,
    Draft,
    DraftWork,
    Logits,
    Request,
    Row,
    Span,
    TokenEstimate,
)
from outrider.core.errors import ConstraintError, RewindUnsupported, SettingError
from outrider.core.sequences import common_prefix
from outrider.models.vocab import Alignment
from outrider.sampling import argmax, confidence

_PREFILL_CHUNK_TOKENS = 256
_SPARE_TOKENS = 32
"""of a context, for what is drafted"""
_MIN_COPIED_TOKENS = 8
"""For fewer than these more, what a sequence holds itself is not given up."""


@dataclass(slots=True)
class _Context:
    """What the draft model should have seen of one sequence, in its own token ids."""

    final: list[int] = field(default_factory=list)
    start: int = 0
    """where in `final` the model began to read"""
    evaluated: list[int] = field(default_factory=list)
    """tokens from there on whose KV is stored; runs ahead of `final` by what was drafted"""
    prompt_length: int = 0
    agree: int = 0
    """how many of these are as in `final`"""
    scope: str = ""
    is_running: bool = False
    last_used: int = 0
    """when its last request began, counted in requests"""

    def extend(self, tokens: Sequence[int]) -> None:
        self.final.extend(tokens)
        end = min(self.held, len(self.evaluated))
        while self.agree < end and self.final[self.start + self.agree] == self.evaluated[self.agree]:
            self.agree += 1

    @property
    def held(self) -> int:
        """Tokens that the model holds once it has read everything."""
        return len(self.final) - self.start

    @property
    def num_unread(self) -> int:
        """Committed tokens that it has not evaluated."""
        return self.held - self.agree

    def restart(self, tokens: Sequence[int]) -> None:
        self.final, self.agree = [], 0
        if self.start >= len(tokens):
            self.start = 0
            self.evaluated.clear()
        self.extend(tokens)
        self.prompt_length = len(tokens)

    def shares(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from where it began, have their KV stored here."""
        return common_prefix(self.evaluated, tokens[self.start :])


@dataclass(slots=True)
class _Growing:
    """A draft under construction for one request."""

    request: DraftRequest
    draft: Draft = field(default_factory=Draft)
    unread: list[int] = field(default_factory=list)
    """its last tokens, in the draft model's ids, that this has not evaluated"""


class ModelDrafter:
    """The Drafter over a draft model, for all sequences in one batch.

    Under the request's own bias, bans, penalties and filters it drafts its most likely tokens as point
    masses, or tokens sampled from its distribution, as the request asks. The estimated acceptance
    is its untempered top probability.

    A model that needs only the end of a text (`alignment.window`) starts reading there, and starts again
    there when more tokens than that are unread, or its context is full.
    """

    name = "draft"
    is_free = False

    def __init__(self, model: Model, alignment: Alignment) -> None:
        self.model = model
        self.alignment = alignment
        self._rows = Rows(alignment)
        # Every sequence's last final tokens go into one call: each gets its share of a batch.
        self._chunk_tokens = max(1, min(_PREFILL_CHUNK_TOKENS, model.max_batch_tokens // model.max_sequences))
        fits = alignment.window + 2 * _SPARE_TOKENS <= model.context_length
        self._window = alignment.window if fits else 0
        self._contexts: dict[int, _Context] = {}
        self._num_begun = 0

    # Committed tokens

    def begin(self, sequence: int, request: Request) -> None:
        context = self._contexts.setdefault(sequence, _Context())
        tokens = self.alignment.read(request.prompt)
        if context.scope != request.scope:
            self._give_up(sequence)
        context.scope, context.is_running = request.scope, True
        self._num_begun += 1
        context.last_used = self._num_begun
        self._take_over(sequence, context, tokens)
        context.restart(tokens)

    def _take_over(self, sequence: int, context: _Context, tokens: Sequence[int]) -> None:
        """Copy what another sequence of the same scope holds of a prompt, where that is more."""
        known = context.shares(tokens)
        alike = {s: c.shares(tokens) for s, c in self._contexts.items() if c.scope == context.scope}
        source = max(alike, key=alike.__getitem__)
        if alike[source] <= known + _MIN_COPIED_TOKENS:
            return
        self._give_up(sequence)
        try:
            self.model.copy(source, sequence, alike[source])
        except RewindUnsupported:
            return
        context.start = self._contexts[source].start
        context.evaluated = list(tokens[context.start : context.start + alike[source]])

    def _give_up(self, sequence: int) -> None:
        self.model.truncate(sequence, 0)
        context = self._contexts[sequence]
        context.evaluated.clear()
        context.start = context.agree = 0

    def _make_room(self, num_tokens: int) -> None:
        """Give up what ended requests left, the oldest first, until so many more tokens can be stored."""
        used = sum(self.model.length(sequence) for sequence in self._contexts)
        idle = (s for s, c in self._contexts.items() if not c.is_running and self.model.length(s))
        for sequence in sorted(idle, key=lambda s: self._contexts[s].last_used):
            if used + num_tokens <= self.model.capacity_tokens:
                return
            used -= self.model.length(sequence)
            self._give_up(sequence)

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        self._contexts[sequence].extend(self.alignment.read(tokens))

    def end(self, sequence: int) -> None:
        """The KV stays, for a request that begins with the same tokens."""
        self._contexts[sequence].is_running = False

    def reset(self) -> None:
        for sequence in self._contexts:
            self.model.truncate(sequence, 0)
        self._contexts.clear()

    # Drafting

    def propose(
        self, requests: Sequence[DraftRequest], stopping: StoppingRule
    ) -> tuple[list[Draft], DraftWork]:
        able = [
            request
            for request in requests
            if self._room(request) > 0 and stopping.should_continue(request, ())
        ]
        if not able:
            return [Draft() for _ in requests], DraftWork()
        growing, work = list[_Growing](), DraftWork()
        for request in able:
            has_read, read = self._catch_up(request, 1 - work.prefill_calls - work.calls)
            growing += [_Growing(request)] if has_read else []
            work += read
        work += self._grow(growing, stopping)
        drafts = {each.request.sequence: each.draft for each in growing}
        return [drafts.get(request.sequence, Draft()) for request in requests], work

    def _room(self, request: DraftRequest) -> int:
        """Tokens that can be drafted before the draft model's own context is full; none after a prefix that
        does not fit a call, and for a head none before the target has read the prompt."""
        if request.num_unread and getattr(self.model, "is_head", False):
            return 0
        context, num_prefix = self._contexts[request.sequence], len(self.alignment.read(request.prefix))
        if not context.final or num_prefix >= self._chunk_tokens:
            return 0
        held = self._window if self._restarts(context) else context.held
        return min(request.max_tokens, self.model.context_length - held - num_prefix)

    def _restarts(self, context: _Context) -> bool:
        is_full = context.held + _SPARE_TOKENS > self.model.context_length
        return bool(self._window) and (context.num_unread > self._window or is_full)

    def _catch_up(self, request: DraftRequest, num_calls: int) -> tuple[bool, DraftWork]:
        """Drop what was not accepted, and evaluate all but a last few final tokens, which go into one call
        with the request's prefix. Where others wait for their next tokens that is done in `num_calls` calls a
        step; whether it is done, and what it took."""
        sequence, num_prefix = request.sequence, len(self.alignment.read(request.prefix))
        context, work = self._contexts[sequence], DraftWork()
        self._rewind(sequence, context)
        if self._restarts(context):  # after a failed call it may hold nothing
            self._give_up(sequence)
            context.start = len(context.final) - self._window
        while True:
            reads_prompt = context.start + context.agree < context.prompt_length - 1
            if not reads_prompt and context.num_unread + num_prefix <= self._chunk_tokens:
                return True, work
            if request.max_step_s is not None and work.prefill_calls + work.calls >= num_calls:
                return False, work
            end = (context.prompt_length if reads_prompt else len(context.final)) - 1
            size, seconds = self._evaluate(sequence, context, end)
            if reads_prompt:
                work += DraftWork(prefill_calls=1, prefill_s=seconds, prefill_tokens=size)
            else:
                work += DraftWork(calls=1, model_s=seconds, call_tokens=(size,))

    def _rewind(self, sequence: int, context: _Context) -> None:
        # At least one final token must be left to evaluate: its logits start the draft.
        # The model may hold less than it was given: a failed call can cost it everything.
        keep = min(context.agree, context.held - 1, self.model.length(sequence))
        keep = self.model.reach(sequence, keep)
        if keep < self.model.length(sequence):
            try:
                self.model.truncate(sequence, keep)
            except RewindUnsupported:
                keep = 0
                self.model.truncate(sequence, 0)
        del context.evaluated[keep:]
        context.agree = keep

    def _evaluate(self, sequence: int, context: _Context, end: int) -> tuple[int, float]:
        """Evaluate a chunk of the final tokens, up to `end` at most; returns its size and the seconds."""
        begin = context.start + context.agree
        tokens = context.final[begin : min(end, begin + self._chunk_tokens)]
        self._make_room(len(tokens))
        before = perf_counter()
        self.model.decode([Span(sequence, tuple(tokens), context.agree, 0)])
        context.evaluated.extend(tokens)
        context.agree += len(tokens)
        return len(tokens), perf_counter() - before

    def _grow(self, active: list[_Growing], stopping: StoppingRule) -> DraftWork:
        """Draft token by token, one call for all sequences whose draft still grows."""
        call_tokens: list[int] = []
        model_s = 0.0
        while active:
            spans = [self._next_span(growing) for growing in active]
            call_tokens.append(sum(len(span.tokens) for span in spans))
            self._make_room(call_tokens[-1])
            before = perf_counter()
            rows = self.model.decode(spans)
            model_s += perf_counter() - before
            for span in spans:
                context = self._contexts[span.sequence]
                context.evaluated.extend(span.tokens)
                context.agree = context.held
            active = [
                growing
                for growing, row in zip(active, rows, strict=True)
                if self._append(growing, row, stopping)
                and len(growing.draft) < self._room(growing.request)
                and self._fits(growing)
                and stopping.should_continue(growing.request, growing.draft.tokens)
            ]
        return DraftWork(len(call_tokens), model_s, call_tokens=tuple(call_tokens))

    def _fits(self, growing: _Growing) -> bool:
        """Whether the draft's last tokens can be read: forced text may be more tokens here than there."""
        stored = len(self._contexts[growing.request.sequence].evaluated)
        return stored + len(growing.unread) <= self.model.context_length

    def _next_span(self, growing: _Growing) -> Span:
        request, context = growing.request, self._contexts[growing.request.sequence]
        tokens, stored = growing.unread, len(context.evaluated)
        # What is committed ends here, but for a prefix: what follows may be rejected.
        checkpoint = stored == context.held
        if not growing.draft:
            tokens = [*context.final[context.start + stored :], *self.alignment.read(request.prefix)]
            checkpoint = bool(request.prefix)
        return Span(request.sequence, tuple(tokens), stored, 1, checkpoint)

    def _append(self, growing: _Growing, logits: Logits, stopping: StoppingRule) -> bool:
        """Append the next token, if `stopping` accepts it, and what is forced after it, which is read in the
        same call; returns whether another may follow."""
        request, row, tokens = growing.request, logits[-1], growing.draft.tokens
        drafted = request.prefix + tokens
        try:
            found = self._rows.argmax(row, request, drafted)
        except (SettingError, ConstraintError):
            return False  # every token that it shares with the target is banned here
        if found is None:
            return False
        token, confidence = found
        estimate = TokenEstimate(confidence)
        if not stopping.accept(request, tokens, estimate):
            return False
        probs: tuple[Distribution, ...] = ()
        if request.draw is not None or request.with_greedy_probs:
            probs = (self._rows.distribution(row, request, drafted),)
        if request.draw is not None:
            token = request.draw(probs[0], len(drafted))
        growing.draft += Draft(
            tokens=(token,),
            probs=probs if request.draw is not None else None,
            acceptance=(confidence,),
            sources=(self.name,),
            greedy_probs=probs if request.draw is None else (),
            estimates=(estimate,),
        )
        growing.unread = self.alignment.read([token])
        if not growing.unread or self.model.vocabulary.ends_generation(growing.unread[0]):
            return False  # nothing follows an end token
        if forced := stopping.append_forced(request, growing.draft.tokens):
            growing.draft += forced
            growing.unread += self.alignment.read(forced.tokens)
        return len(growing.unread) <= self._chunk_tokens


# A draft model's logits, read as the target's tokens under a request's sampler.

_FARTHEST = 60.0
"""A logit so far above the best common one leaves that one no probability that counts."""


class Rows:
    """Looks at one row at a time; `alignment` is the draft's with its target.

    A target can have many more tokens than its draft. Where the request's sampler leaves logits as they are,
    only those of the common tokens are looked at, in the target's order; else they are spread over its
    vocabulary.
    """

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        self._spread: Row | None = None

    def argmax(self, row: Row, request: DraftRequest, drafted: tuple[int, ...]) -> tuple[int, float] | None:
        """The target's token that the draft model finds most likely, and its confidence, before
        temperature and filters.

        None for a point-mass draft where something that the target lacks, or the draft does not know,
        is more likely: its second best is seldom accepted. What the target lacks takes its share of the
        confidence too. Neither holds under a constraint, which would bar an unknown part of that.

        Raises SettingError or ConstraintError where the request leaves no token, BackendError for logits
        that are not numbers.
        """
        alignment, plain = self._alignment, not request.sampler.adjusts(drafted)
        values = (
            alignment.common_part(row) if plain else request.sampler.adjust(self._over_target(row), drafted)
        )
        best = argmax(values)
        certainty = confidence(values, best)
        if request.constraint is None and len(alignment.foreign):
            gaps = row[alignment.foreign] - values[best]
            if request.draw is None and gaps.max() > 0:
                return None
            certainty = 1 / (1 / certainty + float(np.exp(np.minimum(gaps, _FARTHEST)).sum()))
        return int(alignment.common[best]) if plain else best, certainty

    def distribution(self, row: Row, request: DraftRequest, drafted: tuple[int, ...]) -> Distribution:
        """The distribution to sample from, over the tokens that both models have."""
        if self._alignment.identical or request.sampler.adjusts(drafted):
            return request.sampler.distribution(self._over_target(row), drafted)
        found = request.sampler.distribution(self._alignment.common_part(row), drafted)
        return Distribution(self._alignment.common[found.tokens], found.probs)

    def _over_target(self, row: Row) -> Row:
        # One buffer for all: a sampler keeps no row, and large ones are slow to allocate.
        if self._alignment.identical:
            return row
        self._spread = self._alignment.in_target(row, self._spread)
        return self._spread
