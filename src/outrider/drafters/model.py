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

from outrider.core.contracts import Extend, Model, Wish
from outrider.core.data import Distribution, Draft, DraftWork, Logits, SamplingParams, Span
from outrider.core.errors import RewindUnsupported
from outrider.sampling import argmax, confidence, distribution, draw
from outrider.vocab import Alignment

_PREFILL_CHUNK_TOKENS = 256


@dataclass(slots=True)
class _Context:
    """What the draft model should have seen of one sequence, in its own token ids."""

    final: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    """tokens whose KV is stored; runs ahead of `final` by what was drafted"""
    prompt_length: int = 0
    agree: int = 0
    """length of the common prefix of the two"""

    def extend(self, tokens: Sequence[int]) -> None:
        self.final.extend(tokens)
        end = min(len(self.final), len(self.evaluated))
        while self.agree < end and self.final[self.agree] == self.evaluated[self.agree]:
            self.agree += 1

    def restart(self, tokens: Sequence[int]) -> None:
        self.final, self.agree = [], 0
        self.extend(tokens)
        self.prompt_length = len(tokens)


@dataclass(slots=True)
class _Growing:
    """A draft under construction for one wish."""

    wish: Wish
    tokens: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)


class ModelDrafter:
    """The Drafter over a draft model, for all sequences in one batch.

    `sampled` draws the drafted tokens from the draft's own distribution under the request's
    sampling settings; otherwise they are its most likely tokens, offered as certain. The
    estimated acceptance is the draft's untempered top probability.
    """

    name = "draft"

    def __init__(self, model: Model, alignment: Alignment, *, sampled: bool = False) -> None:
        self.model = model
        self._alignment = alignment
        self._sampled = sampled
        # Every sequence's last final tokens go into one call: each gets its share of a batch.
        self._chunk_tokens = max(1, min(_PREFILL_CHUNK_TOKENS, model.max_batch_tokens // model.max_sequences))
        self._contexts: dict[int, _Context] = {}

    # What became final

    def begin(self, sequence: int, tokens: Sequence[int]) -> None:
        self._contexts.setdefault(sequence, _Context()).restart(self._translate(tokens))

    def observe(self, sequence: int, tokens: Sequence[int]) -> None:
        self._contexts[sequence].extend(self._translate(tokens))

    def end(self, sequence: int) -> None:
        """The KV stays, for a request that begins with the same tokens."""

    def reset(self) -> None:
        for sequence in self._contexts:
            self.model.truncate(sequence, 0)
        self._contexts.clear()

    def _translate(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of the target's tokens. One that the draft lacks is left out: it costs
        acceptance behind it, never correctness."""
        if self._alignment.identical:
            return list(tokens)
        ids = self._alignment.to_draft[np.asarray(tokens, dtype=np.int64)]
        return [int(i) for i in ids if i >= 0]

    # What may come next

    def propose(self, wishes: Sequence[Wish], extend: Extend) -> tuple[list[Draft], DraftWork]:
        able = [wish for wish in wishes if self._room(wish) > 0]
        if not able:
            return [Draft() for _ in wishes], DraftWork()
        work = DraftWork()
        for wish in able:
            work += self._catch_up(wish.sequence)
        drafts, decoding = self._grow([_Growing(wish) for wish in able], extend)
        return [drafts.get(wish.sequence, Draft()) for wish in wishes], work + decoding

    def _room(self, wish: Wish) -> int:
        """Tokens that can be drafted before the draft model's own context is full."""
        context = self._contexts[wish.sequence]
        if not context.final:
            return 0
        return min(wish.max_tokens, self.model.context_length - len(context.final))

    def _catch_up(self, sequence: int) -> DraftWork:
        """Drop what was not accepted, and evaluate all but a last few final tokens."""
        context = self._contexts[sequence]
        self._rewind(sequence, context)
        work = DraftWork()
        while context.agree < context.prompt_length - 1:
            seconds = self._evaluate(sequence, context, context.prompt_length - 1)
            work += DraftWork(prefill_calls=1, prefill_s=seconds)
        while len(context.final) - context.agree > self._chunk_tokens:
            seconds = self._evaluate(sequence, context, len(context.final) - 1)
            work += DraftWork(calls=1, model_s=seconds)
        return work

    def _rewind(self, sequence: int, context: _Context) -> None:
        # At least one final token must be left to evaluate: its logits start the draft.
        # The model may hold less than it was given: a failed call can cost it everything.
        keep = min(context.agree, len(context.final) - 1, self.model.length(sequence))
        if keep < self.model.length(sequence):
            try:
                self.model.truncate(sequence, keep)
            except RewindUnsupported:
                keep = 0
                self.model.truncate(sequence, 0)
        del context.evaluated[keep:]
        context.agree = keep

    def _evaluate(self, sequence: int, context: _Context, end: int) -> float:
        """Evaluate a chunk of the final tokens, up to `end` at most; returns the seconds."""
        tokens = context.final[context.agree : min(end, context.agree + self._chunk_tokens)]
        before = perf_counter()
        self.model.decode([Span(sequence, tuple(tokens), context.agree, 0)])
        context.evaluated.extend(tokens)
        context.agree += len(tokens)
        return perf_counter() - before

    def _grow(self, growing: Sequence[_Growing], extend: Extend) -> tuple[dict[int, Draft], DraftWork]:
        """Draft token by token, one call for all sequences whose draft still grows."""
        drafts: dict[int, Draft] = {}
        calls, model_s = 0, 0.0
        active = list(growing)
        while active:
            spans = [self._next_span(draft) for draft in active]
            before = perf_counter()
            rows = self.model.decode(spans)
            model_s += perf_counter() - before
            calls += 1
            for span in spans:
                context = self._contexts[span.sequence]
                context.evaluated.extend(span.tokens)
                context.agree = len(context.final)
            active = [
                draft
                for draft, row in zip(active, rows, strict=True)
                if self._append(draft, row, extend) and len(draft.tokens) < self._room(draft.wish)
            ]
        for draft in growing:
            drafts[draft.wish.sequence] = self._finish(draft)
        return drafts, DraftWork(calls=calls, model_s=model_s)

    def _next_span(self, draft: _Growing) -> Span:
        context = self._contexts[draft.wish.sequence]
        stored = len(context.evaluated)
        if draft.tokens:
            return Span(draft.wish.sequence, (draft.tokens[-1],), stored, 1)
        return Span(draft.wish.sequence, tuple(context.final[stored:]), stored, 1)

    def _append(self, draft: _Growing, logits: Logits, extend: Extend) -> bool:
        """Add the next token, if there is one that the target has and `extend` wants."""
        row = logits[-1]
        best = argmax(row)
        sure = confidence(row, best)
        if not extend(len(draft.tokens), sure):
            return False
        token = best
        if self._is_sampled(draft.wish.sampling):
            offered = self._restrict(distribution(row, draft.wish.sampling))
            if offered is None:
                return False
            token = draw(offered, draft.wish.rng)
            draft.probs.append(offered)
        elif not self._alignment.identical and self._alignment.to_target[token] < 0:
            return False
        draft.tokens.append(token)
        draft.acceptance.append(sure)
        return not self.model.vocabulary.ends_generation(token)  # nothing follows an end

    def _is_sampled(self, sampling: SamplingParams) -> bool:
        return self._sampled and sampling.temperature > 0

    def _restrict(self, offered: Distribution) -> Distribution | None:
        """The distribution over the tokens that the target has; None when it has none of them.

        Drawing from the restriction, instead of giving up on a token that the target lacks,
        keeps what is offered distributed as it claims.
        """
        common = self._alignment.to_target[offered.tokens] >= 0
        if common.all():
            return offered
        total = offered.probs[common].sum()
        return Distribution(offered.tokens[common], offered.probs[common] / total) if total > 0 else None

    def _finish(self, draft: _Growing) -> Draft:
        """The draft in the target's token ids."""
        tokens = self._alignment.to_target[draft.tokens].tolist() if draft.tokens else []
        probs = tuple(self._to_target(offered) for offered in draft.probs)
        return Draft(
            tokens=tuple(tokens),
            probs=probs or None,
            acceptance=tuple(draft.acceptance),
            sources=(self.name,) * len(tokens),
        )

    def _to_target(self, offered: Distribution) -> Distribution:
        if self._alignment.identical:
            return offered
        tokens = self._alignment.to_target[offered.tokens]
        order = np.argsort(tokens)
        return Distribution(tokens[order], offered.probs[order])
