"""Drafts from a second, cheaper model.

The draft model keeps the KV of everything that was accepted, so no token is evaluated by it
twice: of a draft d1 … dn it has evaluated d1 … dn-1, and whatever of them became final stays.
Rounds that it sits out cost nothing; it catches up, in one batch, when it is next asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import cast

import numpy as np

from outrider.core.contracts import DraftInput, DraftProgress, DraftRequest, Model
from outrider.core.data import (
    Block,
    Distribution,
    DraftToken,
    DraftWork,
    Logits,
    Request,
    Row,
    Span,
    TopLogits,
)
from outrider.core.errors import ConstraintError, RewindUnsupported, SettingError
from outrider.core.sequences import common_prefix
from outrider.models.vocab import Alignment

_PREFILL_CHUNK_TOKENS = 256
_SPARE_TOKENS = 32  # of a context, for what is drafted
_MIN_SAVED_TOKENS = 64  # fewer that a sequence holds beyond the next prompt may be cut without a copy
_FARTHEST = 60.0  # a logit so far above the best common one leaves that one no probability that counts
_MIN_COPIED_TOKENS = 8  # for fewer than these more, what a sequence holds itself is not given up


@dataclass(slots=True)
class _Context:
    """What the draft model should have seen of one sequence, in its own token ids."""

    final: list[int] = field(default_factory=list)
    start: int = 0  # where in `final` the model began to read
    # From there on, tokens whose KV is stored; runs ahead of `final` by what was drafted.
    evaluated: list[int] = field(default_factory=list)
    agree: int = 0  # how many of these are as in `final`
    prompt_length: int = 0
    scope: str = ""
    is_running: bool = False

    def extend(self, tokens: Sequence[int]) -> None:
        self.final.extend(tokens)
        end = min(self.held, len(self.evaluated))
        self.agree += common_prefix(self.final[self.start + self.agree :], self.evaluated[self.agree : end])

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
        self.model, self.alignment = model, alignment
        self.block: int = getattr(model, "block", 1)
        self._is_head: bool = getattr(model, "is_head", False)
        self._spread: Row | None = None
        self._chunk_rows = max(1, model.max_rows // model.max_sequences)
        # Every sequence's last final tokens go into one call: each gets its share of a batch.
        self._chunk_tokens = max(1, min(_PREFILL_CHUNK_TOKENS, model.max_batch_tokens // model.max_sequences))
        fits = alignment.window <= model.context_length - 2 * _SPARE_TOKENS
        self._window = alignment.window if fits else 0
        # Tokens of the longest text that it drafts for.
        self.longest_text = sys.maxsize if self._window else model.context_length
        self._ends = model.vocabulary.ends_generation
        self._contexts: dict[int, _Context] = {}  # that whose request began last comes last
        # Called before a sequence's KV is given up, or much of it.
        self.on_evict: Callable[[int], object] = lambda _sequence: None

    # Committed tokens

    def begin(self, sequence: int, request: Request) -> None:
        context = self._contexts[sequence] = self._contexts.pop(sequence, _Context())
        tokens = self.alignment.read(request.prompt)
        if context.scope != request.scope:
            self._evict(sequence)
        elif len(context.evaluated) - context.shares(tokens) >= _MIN_SAVED_TOKENS:
            self.on_evict(sequence)
        context.scope, context.is_running = request.scope, True
        self._take_over(sequence, context, tokens)
        context.restart(tokens)

    def _take_over(self, sequence: int, context: _Context, tokens: Sequence[int]) -> None:
        """Copy what another sequence of the same scope holds of a prompt, where that is more."""
        known = context.shares(tokens)
        alike = self._shares(context.scope, tokens)
        source = max(alike, key=alike.__getitem__)
        if alike[source] <= known + _MIN_COPIED_TOKENS:
            return
        self._evict(sequence)
        try:
            self.model.copy(source, sequence, alike[source])
        except RewindUnsupported:
            return
        context.start = self._contexts[source].start
        context.evaluated = list(tokens[context.start : context.start + alike[source]])

    def text(self, sequence: int) -> tuple[str, list[int]]:
        """The cache namespace and the tokens, in the model's ids, of what a sequence holds from the beginning
        of a text."""
        context = self._contexts.get(sequence, _Context())
        return context.scope, [] if context.start else context.evaluated

    def num_shared(self, scope: str, tokens: Sequence[int]) -> int:
        """The most tokens of a text, in the model's ids, that a sequence of this cache namespace holds."""
        return max(self._shares(scope, tokens).values(), default=0)

    def _shares(self, scope: str, tokens: Sequence[int]) -> dict[int, int]:
        return {s: c.shares(tokens) for s, c in self._contexts.items() if c.scope == scope}

    def take(self, sequence: int, tokens: Sequence[int], restore: Callable[[], bool]) -> None:
        """Let a sequence whose request has just begun hold the KV of these tokens, in the model's ids, which
        `restore` puts into it."""
        context = self._contexts[sequence]
        self._evict(sequence)
        self._make_room(len(tokens))
        if restore():
            context.evaluated = list(tokens)
        context.restart(context.final)

    def _evict(self, sequence: int) -> None:
        self.on_evict(sequence)
        self.model.truncate(sequence, 0)
        context = self._contexts[sequence]
        context.evaluated.clear()
        context.start = context.agree = 0

    def _make_room(self, num_tokens: int) -> None:
        """Give up what ended requests left, the oldest first, until so many more tokens can be stored."""
        if len(self._contexts) < 2:
            return
        excess = sum(map(self.model.length, self._contexts)) + num_tokens - self.model.capacity_tokens
        for sequence, context in self._contexts.items():
            if excess <= 0:
                return
            if not context.is_running:
                excess -= self.model.length(sequence)
                self._evict(sequence)

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

    @property
    def reads_ahead(self) -> bool:
        """Whether a call can check guessed tokens: what it refuses has to be forgotten, and a head would need
        the target's states of them."""
        return self.model.rewinding.is_free and not self._is_head

    def progress(self, sequence: int) -> DraftProgress:
        context = self._contexts[sequence]
        if self._restarts(context):
            return DraftProgress(self._window, 1, self._window - 1)
        unread = max(context.num_unread, 1)
        of_prompt = min(max(context.prompt_length - 1 - context.start - context.agree, 0), unread - 1)
        return DraftProgress(context.held, unread - of_prompt, of_prompt)

    def start(self, requests: Sequence[DraftRequest]) -> ModelRound:
        """Read what is unread of the committed text, so far as the requests let it, and begin a round."""
        begun = ModelRound(self)
        for request in requests:
            context = self._contexts[request.sequence]
            held = self._window if self._restarts(context) else context.held
            # A head drafts only once the target has read the prompt.
            waits = not context.final or (request.num_unread > 0 and self._is_head)
            if not waits and held < self.model.context_length and self._catch_up(request, begun):
                begun.ready[request.sequence] = request, self._top(request)
        return begun

    def _restarts(self, context: _Context) -> bool:
        is_full = context.held + _SPARE_TOKENS > self.model.context_length
        return bool(self._window) and (context.num_unread > self._window or is_full)

    def _catch_up(self, request: DraftRequest, begun: ModelRound) -> bool:
        """Drop what was not accepted, and evaluate all but a last few final tokens, which go into the first
        call of the round. Whether that is done: where others wait for their next tokens, one call a step is
        made for it."""
        sequence = request.sequence
        context = self._contexts[sequence]
        self._rewind(sequence, context)
        if self._restarts(context):  # after a failed call it may hold nothing
            self._evict(sequence)
            context.start = len(context.final) - self._window
        while True:
            reads_prompt = context.start + context.agree < context.prompt_length - 1
            # Drafted tokens come along with the last ones.
            if not reads_prompt and context.num_unread <= max(1, self._chunk_tokens // 2):
                return True
            if request.max_step_s is not None and (begun.read.prefill_calls or begun.calls):
                return False
            end = (context.prompt_length if reads_prompt else len(context.final)) - 1
            begin = context.start + context.agree
            tokens = tuple(context.final[begin : min(end, begin + self._chunk_tokens)])
            self.decode([Span(sequence, tokens, context.agree, 0)], begun, of_prompt=reads_prompt)

    def _rewind(self, sequence: int, context: _Context) -> None:
        # At least one final token must be left to evaluate: its logits start the draft.
        # The model may hold less than it was given: a failed call can cost it everything.
        stored = self.model.length(sequence)
        keep = self.model.reach(sequence, min(context.agree, context.held - 1, stored))
        if keep < stored:
            try:
                self.model.truncate(sequence, keep)
            except RewindUnsupported:
                keep = 0
                self.model.truncate(sequence, 0)
        del context.evaluated[keep:]
        context.agree = keep

    def next_span(self, sequence: int, inputs: DraftInput, top: int) -> Span | None:
        """What a call evaluates of a sequence: committed and drafted tokens that the model has not read, and
        as much of the guess as there is room for. None where the former do not fit, or the text ends."""
        context, drafted = self._contexts[sequence], self.alignment.read(inputs.drafted)
        if inputs.drafted and (not drafted or self._ends(drafted[-1])):
            return None
        held, evaluated = context.held, context.evaluated
        # The last token is read again where its row is gone.
        ahead, known = evaluated[held:], drafted[:-1]
        if ahead != known:
            known = known[: common_prefix(ahead, known)]
            if len(ahead) > len(known):  # refused guesses
                self.model.truncate(sequence, held + len(known))
                del evaluated[held + len(known) :]
        stored = len(evaluated)
        tokens = (*context.final[context.start + stored :], *drafted[len(known) :])
        room = min(self._chunk_tokens, self.model.context_length - stored) - len(tokens)
        if room < 0:
            return None
        guess: Sequence[int] = ()
        if inputs.guess and self.reads_ahead:  # as much of it as the model can read, one of its ids for each
            read = self.alignment.read(inputs.guess[:room])
            if len(read) == len(inputs.guess[:room]):
                guess = list(takewhile(lambda token: not self._ends(token), read))[: self._chunk_rows - 1]
        # The first drafted tokens follow what is committed, and may be rejected.
        is_first = bool(drafted) and stored <= held
        return Span(sequence, (*tokens, *guess), stored, 1 + len(guess), is_first, top)

    def decode(self, spans: Sequence[Span], begun: ModelRound, *, of_prompt: bool = False) -> list[Logits]:
        num_tokens = sum([len(span.tokens) for span in spans])
        self._make_room(num_tokens)
        before = perf_counter()
        rows = self.model.decode(spans)
        seconds = perf_counter() - before
        if of_prompt:
            begun.read += DraftWork(prefill_calls=1, prefill_s=seconds, prefill_tokens=num_tokens)
        else:
            begun.calls.append((num_tokens, seconds))
        for span in spans:
            context = self._contexts[span.sequence]
            context.evaluated.extend(span.tokens)
            context.agree = min(span.start + len(span.tokens), context.held)
        return rows

    def offers(self, rows: Logits, request: DraftRequest, inputs: DraftInput) -> Iterator[DraftToken]:
        """What the model says comes after the drafted tokens and after each of the guess that `next_span`
        reads, from its rows; until the request leaves no token."""
        for place, row in enumerate(rows):
            if (token := self._offer(row, request, (*inputs.drafted, *inputs.guess[:place]))) is None:
                return
            yield token

    def place(self, block: Block, request: DraftRequest, drafted: tuple[int, ...]) -> Iterator[DraftToken]:
        """What a block says comes after the drafted tokens, whatever they are: each of its places is good for
        any tokens before it."""
        place, read = len(drafted), self.alignment.read(drafted)
        if place >= len(block) or (drafted and (not read or self._ends(read[-1]))):
            return
        before = read[-1] if read else self._contexts[request.sequence].final[-1]
        offer = self._offer(block.row(place, before, self.model.vocabulary.size), request, drafted)
        if offer is not None:
            own = offer.acceptance if block.confidence is None else float(block.confidence[place])
            yield offer._replace(acceptance=own, evidence=(own, float(place + 1)))

    def _offer(
        self, row: Row | TopLogits, request: DraftRequest, drafted: tuple[int, ...]
    ) -> DraftToken | None:
        try:
            found = self.look(row, request, drafted)
        except (SettingError, ConstraintError):
            return None  # every token that it shares with the target is banned here
        if found is None:
            return None
        token, certainty, probs = found
        if probs is None or request.draw is None:
            return DraftToken(token, self.name, certainty, (certainty,), None, probs)
        return DraftToken(request.draw(probs, len(drafted)), self.name, certainty, (certainty,), probs)

    def _top(self, request: DraftRequest) -> int:
        if not self.alignment.identical or request.sampler.adjusts(()):
            return 0
        return 1 if request.draw is None and not request.with_mode_of else request.sampler.top

    def look(
        self, row: Row | TopLogits, request: DraftRequest, drafted: tuple[int, ...]
    ) -> tuple[int, float, Distribution | None] | None:
        """The target's token that the draft model finds most likely, its confidence, before temperature and
        filters, and the distribution over the tokens that both have, if the request needs it.

        None for a point-mass draft where something that the target lacks, or the draft does not know,
        is more likely: its second best is seldom accepted. What the target lacks takes its share of the
        confidence too. Neither holds under a constraint, which would bar an unknown part of that.

        Raises SettingError or ConstraintError where the request leaves no token, BackendError for logits
        that are not numbers.
        """
        alignment, sampler = self.alignment, request.sampler
        needs_probs = request.draw is not None or request.with_mode_of
        if isinstance(row, TopLogits):
            return sampler.look(row, with_distribution=needs_probs)
        if alignment.identical:
            return sampler.look(sampler.adjust(row, drafted), with_distribution=needs_probs)
        is_plain = not sampler.adjusts(drafted)
        if is_plain:
            values = alignment.common_part(row)
        else:  # one buffer for all: a sampler keeps no row, and large ones are slow to allocate
            self._spread = alignment.in_target(row, self._spread)
            values = sampler.adjust(self._spread, drafted)
        best, certainty, probs = sampler.look(values, with_distribution=needs_probs)
        if request.constraint is None and len(alignment.foreign):
            gaps = row[alignment.foreign] - values[best]
            if request.draw is None and gaps.max() > 0:
                return None
            certainty = 1 / (1 / certainty + float(np.exp(np.minimum(gaps, _FARTHEST)).sum()))
        if is_plain:
            common = alignment.common
            best, probs = int(common[best]), probs and Distribution(common[probs.tokens], probs.probs)
        return best, certainty, probs


class ModelRound:
    """The DraftRound of a ModelDrafter."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._drafter = drafter
        self.ready: dict[int, tuple[DraftRequest, int]] = {}
        """the requests whose text the model has read, with their `Span.top`"""
        self.read = DraftWork()
        self.calls: list[tuple[int, float]] = []  # their tokens and seconds
        self._blocks: dict[int, Block] | None = None  # what a block drafter said, good for the whole round

    @property
    def work(self) -> DraftWork:
        seconds, tokens = sum([s for _, s in self.calls]), tuple([n for n, _ in self.calls])
        return self.read + DraftWork(len(tokens), seconds, call_tokens=tokens)

    def step(self, inputs: Mapping[int, DraftInput]) -> dict[int, Iterator[DraftToken]]:
        drafter, ready = self._drafter, self.ready
        if drafter.block == 1:
            return {s: drafter.offers(rows, ready[s][0], inputs[s]) for s, rows in self._call(inputs)}
        if self._blocks is None:
            found = self._call(dict.fromkeys(inputs, DraftInput(())))
            self._blocks = {sequence: cast(Block, block) for sequence, block in found}
        blocks = self._blocks
        return {s: drafter.place(blocks[s], ready[s][0], inputs[s].drafted) for s in inputs if s in blocks}

    def _call(self, inputs: Mapping[int, DraftInput]) -> list[tuple[int, Logits]]:
        """One call over those whose text was read; what the model gives for each that it has room for."""
        drafter, ready = self._drafter, self.ready
        found = [drafter.next_span(s, read, ready[s][1]) for s, read in inputs.items() if s in ready]
        spans = [span for span in found if span is not None]
        if not spans:
            return []
        rows = drafter.decode(spans, self)
        return [(span.sequence, each) for span, each in zip(spans, rows, strict=True)]
