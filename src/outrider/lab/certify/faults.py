"""Deliberate faults (`--inject`), to show that the certificate detects them.

`FAULTS` lists them all but `acceptance=FACTOR`, an acceptance ratio that is wrong by a factor. Another broken
rule is token-wise rejection sampling with a mistake that real implementations have made; a broken mask or
call gets past the grammar, or past the calls of equal bits, or leaves a rejected token in what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from outrider.backends.bitwise import BitwiseModel, EqualSizes
from outrider.backends.bitwise.probe import TRIED
from outrider.backends.gguf import GgufModel
from outrider.backends.gguf.heads import State
from outrider.core.contracts import Constraint, Model
from outrider.core.data import Distribution, Draft, Grammar, Logits, Mask, Request, Span, Verdict
from outrider.core.errors import SettingError
from outrider.core.sequences import common_prefix
from outrider.lab.certify.runs import Followed, Wrapped
from outrider.sampling import LazyDistributions, draw, point_mass
from outrider.verify import VerificationRule, Verifier, accept_probability, residual, verify_tokens

Fault = str
"""A name in `FAULTS`."""

Constrain = Callable[[Grammar], Constraint]
"""Makes a fresh constraint of a grammar."""

Rule = Callable[[Sequence[Distribution], Draft, np.random.Generator], Verdict]


def check_fault(name: str) -> Fault:
    """The fault of that name. Raises SettingError for an unknown one."""
    if name not in FAULTS and _ratio_factor(name) is None:
        known = f"{', '.join(FAULTS)} or {RATIO_FAULT}1.03"
        raise SettingError("--inject", f"{name!r} is no known fault", f"Choose one of {known}.")
    return name


# Rules

RATIO_FAULT = "acceptance="
"""begins the fault that takes the acceptance ratio p / q times the number that follows"""


def _ratio_factor(fault: str | None) -> float | None:
    if fault is None or not fault.startswith(RATIO_FAULT):
        return None
    try:
        factor = float(fault.removeprefix(RATIO_FAULT))
    except ValueError:
        return None
    return factor if 0 < factor < math.inf and factor != 1 else None


class _WrongRatio(Wrapped):
    """A VerificationRule that takes p / q times a factor, where it samples and has such a ratio."""

    def __init__(self, inner: VerificationRule, factor: float, seed: int) -> None:
        super().__init__(inner)
        self._factor = factor
        self._rng = np.random.default_rng((seed, 1))  # not the numbers that the inner rule draws with

    def verify(self, target: LazyDistributions, draft: Draft, position: int) -> Verdict:
        if draft.probs is None and draft.tokens:
            return verify_tokens(target, draft, self._rng, 1 / self._factor)
        probs = tuple(replace(q, probs=q.probs / self._factor) for q in draft.probs or ())
        return cast(Verdict, self.inner.verify(target, replace(draft, probs=probs), position))


def _rejection(
    target: Sequence[Distribution],
    draft: Draft,
    rng: np.random.Generator,
    *,
    accept: Callable[[Distribution, Distribution, int], float] = accept_probability,
    recover: Callable[[Distribution, Distribution], Distribution] = residual,
) -> Verdict:
    """Token-wise rejection sampling with other parts: `accept(p, q, token)` is the acceptance probability of
    a token, `recover(p, q)` the distribution that replaces a rejected one."""
    for i, token in enumerate(draft.tokens):
        p, q = target[i], point_mass(token) if draft.probs is None else draft.probs[i]
        if rng.random() >= accept(p, q, token):
            return Verdict(i, draw(recover(p, q), rng), "recovered")
    return Verdict(len(draft), draw(target[len(draft)], rng), "bonus")


def _reuse_random(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
    value = rng.random()
    return verify_tokens(target, draft, cast(np.random.Generator, SimpleNamespace(random=lambda: value)))


def _keep_rejected(target: Sequence[Distribution], draft: Draft, rng: np.random.Generator) -> Verdict:
    verdict = verify_tokens(target, draft, rng)
    if verdict.num_accepted == len(draft):
        return verdict
    return Verdict(verdict.num_accepted, draft.tokens[verdict.num_accepted], "recovered")


REDUCED_FAULT = "draft-tokens-only"


def _within_draft(target: Distribution, draft: Distribution) -> Distribution:
    left = residual(target, draft)
    known = np.isin(left.tokens, draft.tokens)
    if not known.any():
        return left
    return Distribution(left.tokens[known], left.probs[known] / left.probs[known].sum())


RULE_FAULTS: Mapping[Fault, Rule] = {
    # A rejected token is replaced by one from the target's whole distribution.
    "no-residual": partial(_rejection, recover=lambda p, _q: p),
    # What the draft cannot say is never said in place of a rejected token either.
    REDUCED_FAULT: partial(_rejection, recover=_within_draft),
    # Target and draft exchange their roles in the decision and in the residual.
    "swapped": partial(
        _rejection,
        accept=lambda p, q, token: accept_probability(q, p, token),
        recover=lambda p, q: residual(q, p),
    ),
    # The most likely token is offered as if it had been drawn (`BrokenVerifier.drawing`).
    "argmax-draft": verify_tokens,
    # One random number serves all decisions and draws of a step.
    "reused-random": _reuse_random,
    # A rejected token is emitted all the same.
    "kept-rejected": _keep_rejected,
}


def verifier_with(fault: Fault | None) -> Callable[[Request, int], VerificationRule]:
    """What makes an engine's verifiers: broken ones for requests that speculate, else sound ones."""
    factor = _ratio_factor(fault)

    def make(request: Request, seed: int) -> VerificationRule:
        if request.speculate and fault is not None and fault in RULE_FAULTS:
            return BrokenVerifier(fault, request, seed)
        sound = Verifier.of(request, seed)
        has_ratio = request.verification.rule != "stable" and not request.sampling.is_greedy
        if request.speculate and factor is not None and has_ratio:
            return cast(VerificationRule, _WrongRatio(sound, factor, seed))
        return sound

    return make


class BrokenVerifier:
    """A VerificationRule with a fault, for one request."""

    compares = False

    def __init__(self, fault: Fault, request: Request, seed: int) -> None:
        self.name = f"broken on purpose: {fault}"
        self._fault = fault
        self._rng = np.random.default_rng(seed)
        self._draws = not request.sampling.is_greedy and (
            request.verification.draft_sampling != "greedy" or fault == "argmax-draft"
        )

    def drawing(self, position: int) -> Callable[[Distribution, int], int] | None:
        del position
        if not self._draws:
            return None
        if self._fault == "argmax-draft":
            return lambda offered, _index: int(offered.tokens[np.argmax(offered.probs)])
        return lambda offered, _index: draw(offered, self._rng)

    def verify(self, target: Sequence[Distribution], draft: Draft, position: int) -> Verdict:
        del position
        return RULE_FAULTS[self._fault](target, draft, self._rng)


# Masks of a grammar


class _UnmaskedDrafts(Wrapped):
    """After a drafted token everything is allowed: the mask was made once for the step. What was emitted
    against the grammar is emitted all the same, and from then on nothing is limited."""

    def __init__(self, inner: Constraint) -> None:
        super().__init__(inner)
        self._lost = False

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return None if drafted or self._lost else cast(Mask | None, self.inner.allowed(()))

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        first = () if drafted or self._lost else tokens[:1]
        return len(tokens) if self.inner.permits((), first) == len(first) else 0

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        if self._lost or self.inner.permits((), drafted) < len(drafted):
            return ()
        return cast(tuple[int, ...], self.inner.forced(drafted))

    def accept(self, tokens: Sequence[int]) -> None:
        self._lost = self._lost or self.inner.permits((), tokens) < len(tokens)
        if not self._lost:
            self.inner.accept(tokens)

    @property
    def is_complete(self) -> bool:
        return not self._lost and bool(self.inner.is_complete)

    @property
    def is_accepted(self) -> bool:
        return not self._lost and bool(self.inner.is_accepted)


class _ForcingMask(Wrapped):
    """Where text is forced only its usual tokens are allowed, as in canonical decoding: the mask that the
    library gives by default."""

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        mask: Mask | None = self.inner.allowed(drafted)
        forced = self.inner.forced(drafted)
        if mask is None or not forced:
            return mask
        only = np.zeros_like(mask)
        only[forced[0]] = True
        return only


MASK_FAULTS: Mapping[Fault, Callable[[Constraint], Any]] = {
    "unmasked-drafts": _UnmaskedDrafts,
    "forcing-mask": _ForcingMask,
}


def check_shows(fault: Fault, grammar: Grammar | None) -> None:
    """Refuse a fault of masks where there are none to break. Raises SettingError."""
    if fault not in MASK_FAULTS:
        return
    if grammar is None:
        why = "it breaks the masks of a grammar, and there is none"
        raise SettingError(f"--inject {fault}", why, "Add --json-schema or another kind.")
    if fault == "forcing-mask" and grammar.fast_forward != "exact":
        why = f"with --fast-forward {grammar.fast_forward} it changes nothing"
        raise SettingError(f"--inject {fault}", why, "Use --fast-forward exact.")


def break_masks(fault: Fault | None, constrain: Constrain | None) -> Constrain | None:
    """Makes constraints with that fault; sound ones for no fault and for those of rules and calls."""
    if constrain is None or fault is None or fault not in MASK_FAULTS:
        return constrain
    make, broken = constrain, MASK_FAULTS[fault]
    return lambda grammar: cast(Constraint, broken(make(grammar)))


# Calls, and what is stored after them

CALL_FAULTS = ("unequal-calls", "short-rewind", "rejected-state")
"""unequal-calls: drafts are checked in calls of sizes that do not give equal bits; short-rewind: a model that
goes back leaves one rejected token where it was; rejected-state: a head reads on with the target's state of a
rejected token."""


def unequal_sizes(model: BitwiseModel) -> tuple[int, ...]:
    """The sizes of calls that were tried and give other bits than the equal ones, ascending."""
    limit = min(model.max_rows, model.max_batch_tokens)
    return tuple(size for size in TRIED if size <= limit and size not in model.sizes.sizes)


def break_calls(fault: Fault | None, target: Model) -> Model:
    """The target with that fault; itself for no fault and for those of rules and masks.

    Raises SettingError where the fault could not show.
    """
    if fault == "short-rewind":
        return cast(Model, _ShortRewind(target))
    if fault == "rejected-state":
        return cast(Model, _RejectedState(target))
    if fault not in CALL_FAULTS:
        return target
    if not isinstance(target, BitwiseModel):
        why = "it breaks calls of equal bits, and this target's are not kept to them"
        raise SettingError(f"--inject {fault}", why, "Add --bitwise.")
    unequal = unequal_sizes(target)
    if not unequal:
        why = f"calls of every size give equal bits here ({target.sizes} tokens), so it changes nothing"
        raise SettingError(f"--inject {fault}", why, "Choose another --backend, or another fault.")
    return cast(Model, _UnequalCalls(target, EqualSizes(unequal)))


def check_shown(fault: Fault | None, target: Model) -> None:
    """Refuse a verdict on texts in which nothing was checked that this fault breaks; `target` is what
    `break_calls` gave. Raises SettingError."""
    broken: object = target
    if isinstance(broken, _UnequalCalls | _ShortRewind | _RejectedState) and not broken.num_broken:
        why = "no draft was checked in these texts, so it could not show"
        raise SettingError(f"--inject {fault}", why, "Give a draft (-md), more tokens (-n) or other prompts.")


class _UnequalCalls(Wrapped):
    """A model of equal calls that makes calls of other sizes for spans that are checked: padding is left
    out, or there is too much of it. `num_broken` counts them."""

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
            return cast(list[Logits], self.inner.decode(spans))
        finally:
            self.inner.sizes = equal

    def _fits(self, span: Span) -> bool:
        taken, size = self._unequal.parts(len(span.tokens))[-1]
        return bool(span.start + len(span.tokens) - taken + size <= self.context_length)


class _ShortRewind(Followed):
    """A model that goes back one token too few: the first rejected token stays, whatever is to stand there.
    `num_broken` counts these."""

    def __init__(self, sound: Model) -> None:
        super().__init__(sound)
        self._taken_back: dict[int, list[int]] = {}
        """of each sequence, tokens that have not been replaced yet"""
        self.num_broken = 0

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        return super().decode([self._with_rejected(span) for span in spans])

    def _with_rejected(self, span: Span) -> Span:
        taken_back = self._taken_back.pop(span.sequence, [])
        same = common_prefix(taken_back, span.tokens)
        if same < min(len(taken_back), len(span.tokens)):
            self.num_broken += 1
            return replace(span, tokens=(*span.tokens[:same], taken_back[same], *span.tokens[same + 1 :]))
        self._taken_back[span.sequence] = taken_back[same:]
        return span

    def _forget(self, sequence: int, length: int) -> list[int]:
        taken_back = super()._forget(sequence, length)
        self._taken_back[sequence] = taken_back if length else []
        return taken_back


class _RejectedState(Wrapped):
    """A target whose head reads the token after a rejection with the state of the first rejected token.
    `num_broken` counts these. Raises SettingError where no head drafts."""

    def __init__(self, sound: Model) -> None:
        super().__init__(sound)
        hidden = sound.hidden if isinstance(sound, GgufModel) else None
        if hidden is None:
            why = "it breaks what a head reads, and none drafts here"
            raise SettingError(
                "--inject rejected-state", why, "Give a model with a head, or a file of one (-md)."
            )
        self._before, self._truncate = hidden.before, hidden.truncate
        self._rejected: dict[int, tuple[int, State]] = {}
        self.num_broken = 0
        vars(hidden).update(before=self._wrong_before, truncate=self._keep_and_truncate)

    def _keep_and_truncate(self, sequence: int, length: int) -> None:
        rejected = self._before(sequence, length + 1) if length else None
        self._rejected.pop(sequence, None)
        if rejected is not None:
            self._rejected[sequence] = length, rejected
        self._truncate(sequence, length)

    def _wrong_before(self, sequence: int, position: int) -> State | None:
        at, state = self._rejected.get(sequence, (position + 1, None))
        if position < at or self._before(sequence, position + 1) is not None:
            return self._before(sequence, position)
        self.num_broken += 1
        return state


FAULTS: tuple[Fault, ...] = (*RULE_FAULTS, *MASK_FAULTS, *CALL_FAULTS)
