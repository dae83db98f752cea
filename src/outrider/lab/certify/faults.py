"""Deliberate faults (`--inject`), to show that the certificate detects them: ten that differ in kind,
mistakes that real implementations have made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np

from outrider.backends.bitwise import TRIED, BitwiseModel, EqualSizes
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Distribution, Draft, Logits, Mask, Request, Span, Verdict
from outrider.core.errors import SettingError
from outrider.core.sequences import common_prefix
from outrider.lab.certify.texts import Constrain, Followed, Wrapped
from outrider.sampling import LazyDistributions, draw, point_mass
from outrider.verify import Verifier
from outrider.verify.rules import verify_tokens


def check_fault(name: str) -> str:
    """The fault of that name. Raises SettingError for an unknown one."""
    if name not in FAULTS and _ratio_factor(name) is None:
        known = f"{', '.join(FAULTS)} or {RATIO_FAULT}1.03"
        raise SettingError("--inject", f"{name!r} is not a known fault", f"Choose one of {known}.")
    return name


# Rules

RATIO_FAULT = "acceptance="
"""begins the fault that takes the acceptance ratio p / q times the number that follows"""
RULE_FAULTS = ("no-residual", "argmax-draft", "reused-random", "kept-rejected")
"""no-residual: a rejected token is replaced by one from the target's whole distribution; argmax-draft: the
draft's most likely token is offered as if it had been drawn; reused-random: one random number serves all
decisions and draws of a step; kept-rejected: a rejected token is emitted all the same"""


def _ratio_factor(fault: str) -> float | None:
    if not fault.startswith(RATIO_FAULT):
        return None
    try:
        factor = float(fault.removeprefix(RATIO_FAULT))
    except ValueError:
        return None
    return factor if 0 < factor < math.inf and factor != 1 else None


class _BrokenRule(Wrapped):
    """A Verifier with a fault; its random numbers are none of the sound rule's."""

    inner: Verifier

    def __init__(self, inner: Verifier, fault: str, seed: int) -> None:
        super().__init__(inner)
        self._fault = fault
        self._rng = np.random.default_rng((seed, 1))

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        drawing = self.inner.drawing(position)
        if drawing is None or self._fault != "argmax-draft":
            return drawing
        return lambda offered, _index: int(offered.tokens[np.argmax(offered.probs)])

    def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        if (factor := _ratio_factor(self._fault)) is not None:
            return self._with_ratio(target, draft, position, factor)
        if self._fault == "reused-random":
            value = self._rng.random()
            same = cast(np.random.Generator, SimpleNamespace(random=lambda: value))
            return verify_tokens(target, draft, same)
        verdict = self.inner.verify(target, draft, position)
        at = verdict.num_accepted
        if verdict.token is None or at == len(draft) or self._fault == "argmax-draft":
            return verdict
        is_drawn = self._fault == "no-residual"
        return replace(verdict, token=draw(target[at], self._rng) if is_drawn else draft.tokens[at])

    def _with_ratio(self, target: LazyDistributions, draft: Draft, position: int, factor: float) -> Verdict:
        offered = draft.probs or tuple(map(point_mass, draft.tokens))
        wrong = tuple(
            token._replace(drawn_from=replace(q, probs=q.probs / factor))
            for token, q in zip(draft.items, offered, strict=True)
        )
        if draft.probs is None and draft.tokens:
            return verify_tokens(target, Draft(wrong), self._rng)
        return self.inner.verify(target, Draft(wrong), position)


def verifier_with(fault: str | None) -> Callable[[Request, int], Verifier]:
    """Makes an engine's verifiers: broken ones for requests that speculate, else sound ones."""

    def make(request: Request, seed: int) -> Verifier:
        sound = Verifier.of(request, seed)
        has_ratio = request.verification.rule != "stable" and not request.sampling.is_greedy
        is_broken = fault in RULE_FAULTS or (has_ratio and fault is not None and _ratio_factor(fault))
        if fault is None or not is_broken or not request.speculate:
            return sound
        return cast(Verifier, _BrokenRule(sound, fault, seed))

    return make


# Masks of a grammar

MASK_FAULT = "unmasked-drafts"


class _UnmaskedDrafts(Wrapped):
    """After a drafted token everything is allowed: the mask was made once for the step. What was emitted
    against the grammar is emitted all the same, and from then on nothing is limited."""

    inner: Constraint

    def __init__(self, inner: Constraint) -> None:
        super().__init__(inner)
        self._lost = False

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return None if drafted or self._lost else self.inner.allowed(())

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        first = () if drafted or self._lost else tokens[:1]
        return len(tokens) if self.inner.permits((), first) == len(first) else 0

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        if self._lost or self.inner.permits((), drafted) < len(drafted):
            return ()
        return self.inner.forced(drafted)

    def accept(self, tokens: Sequence[int]) -> None:
        self._lost = self._lost or self.inner.permits((), tokens) < len(tokens)
        if not self._lost:
            self.inner.accept(tokens)

    @property
    def is_complete(self) -> bool:
        return not self._lost and self.inner.is_complete

    @property
    def is_accepted(self) -> bool:
        return not self._lost and self.inner.is_accepted


def break_masks(fault: str | None, constrain: Constrain | None) -> Constrain | None:
    """Makes constraints with that fault; sound ones for other faults."""
    if constrain is None or fault != MASK_FAULT:
        return constrain
    return lambda grammar: cast(Constraint, _UnmaskedDrafts(constrain(grammar)))


# Calls, and what is stored after them

CALL_FAULTS = ("unequal-calls", "short-rewind")
"""unequal-calls: drafts are checked in calls of sizes that do not give equal bits; short-rewind: a model that
rolls back leaves one rejected token where it was"""


def unequal_sizes(model: BitwiseModel) -> tuple[int, ...]:
    """The sizes of calls that were tried and give other bits than the equal ones, ascending."""
    limit = min(model.max_rows, model.max_batch_tokens)
    return tuple(size for size in TRIED if size <= limit and size not in model.sizes.sizes)


def break_calls(fault: str | None, target: Model) -> Model:
    """The target with that fault; itself for other faults. Raises SettingError where it could not show."""
    if fault == "short-rewind":
        return cast(Model, _ShortRewind(target))
    if fault != "unequal-calls":
        return target
    if not isinstance(target, BitwiseModel):
        why = "it breaks calls of equal bits, and this target's are not kept to them"
        raise SettingError(f"--inject {fault}", why, "Add --bitwise.")
    unequal = unequal_sizes(target)
    if not unequal:
        why = f"calls of every size give equal bits here ({target.sizes} tokens), so it changes nothing"
        raise SettingError(f"--inject {fault}", why, "Choose another --backend, or another fault.")
    return cast(Model, _UnequalCalls(target, EqualSizes(unequal)))


def check_shown(fault: str | None, target: Model) -> None:
    """Refuse a verdict on texts in which nothing was checked that this fault breaks; `target` is what
    `break_calls` gave. Raises SettingError."""
    broken: object = target
    if isinstance(broken, _UnequalCalls | _ShortRewind) and not broken.num_broken:
        why = "no draft was checked in these texts, so it could not show"
        raise SettingError(f"--inject {fault}", why, "Give a draft (-md), more tokens (-n) or other prompts.")


class _UnequalCalls(Wrapped):
    """A model of equal calls that makes calls of other sizes for spans that are checked: padding is left
    out, or there is too much of it. `num_broken` counts them."""

    inner: BitwiseModel

    def __init__(self, sound: BitwiseModel, unequal: EqualSizes) -> None:
        super().__init__(sound)
        self._unequal = unequal
        self.num_broken = 0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        equal = self.inner.sizes
        if any(span.rows > 1 for span in spans) and all(map(self._fits, spans)):
            self.inner.sizes = self._unequal
            self.num_broken += 1
        try:
            return self.inner.decode(spans)
        finally:
            self.inner.sizes = equal

    def _fits(self, span: Span) -> bool:
        taken, size = self._unequal.parts(len(span.tokens))[-1]
        return span.start + len(span.tokens) - taken + size <= self.inner.context_length


class _ShortRewind(Followed):
    """A model that rolls back one token too few: the first rejected token stays, whatever is to stand there.
    `num_broken` counts these."""

    def __init__(self, sound: Model) -> None:
        super().__init__(sound)
        self.num_broken = 0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        found: list[Logits] = self.inner.decode([self._with_rejected(span) for span in spans])
        return found

    def _with_rejected(self, span: Span) -> Span:
        stored, tokens = self.stored.get(span.sequence, ()), span.tokens
        taken_back = stored[span.start :] if span.start else ()  # from 0 on it is another text
        same = common_prefix(taken_back, tokens)
        left = taken_back[len(tokens) :]
        if same < min(len(taken_back), len(tokens)):
            self.num_broken += 1
            tokens, left = (*tokens[:same], taken_back[same], *tokens[same + 1 :]), ()
        self.stored[span.sequence] = (*stored[: span.start], *tokens, *left)
        return span._replace(tokens=tokens)


# What heads read (`drafts`), which changes drafts and no text.

STALE, SHIFTED = "stale-states", "shifted-block"
DRAFT_FAULTS = (STALE, SHIFTED)
"""stale-states: a head goes on with its target's state of a rejected token; shifted-block: a block is read
one place off"""

FAULTS = (*RULE_FAULTS, MASK_FAULT, *CALL_FAULTS, *DRAFT_FAULTS)
