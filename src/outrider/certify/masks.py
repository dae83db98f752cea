"""Constraints of a certificate's runs: in the middle of an answer, and broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.certify.faults import MASK_FAULTS, Fault
from outrider.core.contracts import Constraint
from outrider.core.data import Grammar, Mask
from outrider.core.errors import SettingError

__all__ = ["Constrain", "behind", "break_masks", "check_shows"]

Constrain = Callable[[Grammar], Constraint]
"""Makes a fresh constraint of a grammar."""


def behind(constrain: Constrain | None, tokens: Sequence[int]) -> Constrain | None:
    """Makes constraints that have read these tokens: for prompts that end with part of an answer."""
    if constrain is None or not tokens:
        return constrain
    make = constrain

    def advanced(grammar: Grammar) -> Constraint:
        constraint = make(grammar)
        constraint.accept(tokens)
        return constraint

    return advanced


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
    """Makes constraints with that fault; sound ones for no fault and for those of rules."""
    if constrain is None or fault not in MASK_FAULTS:
        return constrain
    make, broken = constrain, _Unmasked if fault == "unmasked-drafts" else _Forcing
    return lambda grammar: broken(make(grammar))


class _Unmasked:
    """Behind a drafted token everything is allowed: the mask was made once for the step. What was emitted
    against the grammar is emitted all the same, and then nothing is limited any more."""

    def __init__(self, sound: Constraint) -> None:
        self._sound = sound
        self._lost = False

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return None if drafted or self._lost else self._sound.allowed(())

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        first = () if drafted or self._lost else tokens[:1]
        return len(tokens) if self._sound.permits((), first) == len(first) else 0

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        if self._lost or self._sound.permits((), drafted) < len(drafted):
            return ()
        return self._sound.forced(drafted)

    def accept(self, tokens: Sequence[int]) -> None:
        if not self._lost and self._sound.permits((), tokens) == len(tokens):
            self._sound.accept(tokens)
        else:
            self._lost = True

    @property
    def is_complete(self) -> bool:
        return not self._lost and self._sound.is_complete

    @property
    def is_accepted(self) -> bool:
        return not self._lost and self._sound.is_accepted


class _Forcing:
    """Where text is forced only its usual tokens are allowed: the mask that the library gives unless it is
    told otherwise."""

    def __init__(self, sound: Constraint) -> None:
        self._sound = sound

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        mask, forced = self._sound.allowed(drafted), self._sound.forced(drafted)
        if mask is None or not forced:
            return mask
        only = np.zeros_like(mask)
        only[forced[0]] = True
        return only

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        return self._sound.permits(drafted, tokens)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return self._sound.forced(drafted)

    def accept(self, tokens: Sequence[int]) -> None:
        self._sound.accept(tokens)

    @property
    def is_complete(self) -> bool:
        return self._sound.is_complete

    @property
    def is_accepted(self) -> bool:
        return self._sound.is_accepted
