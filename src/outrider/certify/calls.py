"""Calls broken on purpose: sizes that do not give equal bits are let through where something is checked."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bitwise import BitwiseModel, EqualSizes
from outrider.bitwise.probe import TRIED
from outrider.certify.faults import CALL_FAULTS, Fault
from outrider.core.contracts import Model, Vocabulary
from outrider.core.data import Logits, Span
from outrider.core.errors import SettingError

__all__ = ["break_calls", "check_shown", "unequal_sizes"]


def unequal_sizes(model: BitwiseModel) -> tuple[int, ...]:
    """The sizes of calls that were tried and give other bits than the equal ones, ascending."""
    limit = min(model.max_rows, model.max_batch_tokens)
    return tuple(size for size in TRIED if size <= limit and size not in model.sizes.sizes)


def break_calls(fault: Fault | None, target: Model) -> Model:
    """The target with that fault; itself for no fault and for those of rules and masks.

    Raises SettingError where the fault could not show.
    """
    if fault not in CALL_FAULTS:
        return target
    if not isinstance(target, BitwiseModel):
        why = "it breaks calls of equal bits, and this target's are not kept to them"
        raise SettingError(f"--inject {fault}", why, "Add --bitwise.")
    unequal = unequal_sizes(target)
    if not unequal:
        why = f"calls of every size give equal bits here ({target.sizes} tokens), so it changes nothing"
        raise SettingError(f"--inject {fault}", why, "Choose another --backend, or another fault.")
    return _UnequalCalls(target, EqualSizes(unequal))


def check_shown(fault: Fault | None, target: Model) -> None:
    """Refuse to judge by texts in which nothing was checked that this fault breaks; `target` is what
    `break_calls` gave. Raises SettingError."""
    if isinstance(target, _UnequalCalls) and not target.num_broken:
        why = "no draft was checked in these texts, so it could not show"
        raise SettingError(f"--inject {fault}", why, "Give a draft (-md), more tokens (-n) or other prompts.")


class _UnequalCalls:
    """A model of equal calls that makes calls of other sizes for spans that are checked: padding is left
    out, or there is too much of it."""

    def __init__(self, sound: BitwiseModel, unequal: EqualSizes) -> None:
        self._sound = sound
        self._unequal = unequal
        self.num_broken = 0
        """calls so far that were not as they should be"""
        self.name = sound.name
        self.vocabulary: Vocabulary = sound.vocabulary
        self.context_length = sound.context_length
        self.max_sequences = sound.max_sequences
        self.capacity_tokens = sound.capacity_tokens
        self.max_batch_tokens = sound.max_batch_tokens
        self.max_rows = sound.max_rows
        self.rewind = sound.rewind

    def decode(self, spans: Sequence[Span]) -> list[Logits]:
        equal = self._sound.sizes
        if any(span.rows > 1 for span in spans) and all(map(self._fits, spans)):
            self._sound.sizes = self._unequal
            self.num_broken += 1
        try:
            return self._sound.decode(spans)
        finally:
            self._sound.sizes = equal

    def _fits(self, span: Span) -> bool:
        """Whether the filler has room in the context."""
        taken, size = self._unequal.parts(len(span.tokens))[-1]
        return span.start + len(span.tokens) - taken + size <= self.context_length

    def length(self, sequence: int) -> int:
        return self._sound.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self._sound.truncate(sequence, length)

    def copy(self, source: int, sequence: int, length: int) -> None:
        self._sound.copy(source, sequence, length)

    def close(self) -> None:
        self._sound.close()
