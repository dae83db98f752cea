"""Rules that are broken on purpose, to show that the certificate finds them out.

Each rule is token-wise rejection sampling with one mistake that real implementations have made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast, get_args

import numpy as np

from outrider.core.data import Distribution, Draft, Request, Verdict
from outrider.core.errors import SettingError
from outrider.sampling import draw, point_mass
from outrider.verify import VerificationRule, Verifier, accept_probability, residual, verify_tokens

__all__ = [
    "CALL_FAULTS",
    "FAULTS",
    "MASK_FAULTS",
    "CallFault",
    "Fault",
    "MaskFault",
    "check_fault",
    "judge_with",
]

Fault = Literal[
    "no-residual",
    "swapped",
    "argmax-draft",
    "reused-random",
    "kept-rejected",
    "unmasked-drafts",
    "forcing-mask",
    "unequal-calls",
]
"""no-residual: a rejected token is replaced by one from the target's whole distribution.
swapped: target and draft exchange their roles in the decision and in the residual.
argmax-draft: the most likely token is offered as if it had been drawn.
reused-random: one random number serves all decisions and draws of a step.
kept-rejected: a rejected token is emitted all the same.
The next two break a grammar's masks, not the rule (`outrider.certify.masks`), the last one the calls of
bit-equal text (`outrider.certify.calls`)."""

MaskFault = Literal["unmasked-drafts", "forcing-mask"]
"""unmasked-drafts: behind a drafted token everything is allowed.
forcing-mask: where text is forced only its usual tokens are allowed, as in canonical decoding."""

MASK_FAULTS: tuple[MaskFault, ...] = get_args(MaskFault)

CallFault = Literal["unequal-calls"]
"""unequal-calls: drafts are checked in calls of sizes that do not give equal bits."""

CALL_FAULTS: tuple[CallFault, ...] = get_args(CallFault)

FAULTS: tuple[Fault, ...] = get_args(Fault)


def check_fault(name: str) -> Fault:
    """The fault of that name. Raises SettingError for an unknown one."""
    if name not in FAULTS:
        raise SettingError("--inject", f"{name!r} is no known fault", f"Choose one of {', '.join(FAULTS)}.")
    return name


def judge_with(fault: Fault | None) -> Callable[[Request, int], VerificationRule]:
    """What makes an engine's judges: broken ones for requests that speculate, sound ones else."""
    if fault is None or fault in MASK_FAULTS or fault in CALL_FAULTS:
        return Verifier.of
    broken = fault

    def make(request: Request, seed: int) -> VerificationRule:
        return BrokenJudge(broken, request, seed) if request.speculate else Verifier.of(request, seed)

    return make


class BrokenJudge:
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
        if self._fault == "no-residual":
            return _judge(target, draft, self._rng, accept_probability, lambda p, _q: p)
        if self._fault == "swapped":
            return _judge(
                target,
                draft,
                self._rng,
                lambda p, q, token: accept_probability(q, p, token),
                lambda p, q: residual(q, p),
            )
        rng = self._rng
        if self._fault == "reused-random":
            rng = cast(np.random.Generator, _Stuck(rng.random()))
        verdict = verify_tokens(target, draft, rng)
        if self._fault == "kept-rejected" and verdict.num_accepted < len(draft):
            return Verdict(verdict.num_accepted, draft.tokens[verdict.num_accepted], "recovered")
        return verdict


class _Stuck:
    """A generator whose every uniform is the same."""

    def __init__(self, value: float) -> None:
        self._value = value

    def random(self) -> float:
        return self._value


def _judge(
    target: Sequence[Distribution],
    draft: Draft,
    rng: np.random.Generator,
    accept: Callable[[Distribution, Distribution, int], float],
    replacement: Callable[[Distribution, Distribution], Distribution],
) -> Verdict:
    """Token-wise rejection with other parts put in."""
    for i, token in enumerate(draft.tokens):
        p, q = target[i], point_mass(token) if draft.probs is None else draft.probs[i]
        if rng.random() >= accept(p, q, token):
            return Verdict(i, draw(replacement(p, q), rng), "recovered")
    return Verdict(len(draft), draw(target[len(draft)], rng), "bonus")
