"""The constraint of one request: what its output may be, after any draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.constraints.walker import Walker
from outrider.core.data import Mask
from outrider.core.errors import ConstraintError


class GrammarConstraint:
    """Fulfils `core.contracts.Constraint` on llguidance.

    `masks` walks the matcher whose masks are the truth, with forcing or without; `guide`, if there is one,
    says what is forced. End tokens are kept here, away from the matchers. `keeps` lives as long as the
    constraint does.
    """

    def __init__(
        self,
        masks: Walker,
        guide: Walker | None,
        ends: Sequence[int],
        *,
        forcing: bool,
        keeps: object = None,
    ) -> None:
        self._ends = frozenset(ends)
        self._walker = masks
        self._guide = guide
        self._forcing = forcing
        self._keeps = keeps
        self._ended = False

    def allowed(self, drafted: Sequence[int]) -> Mask | None:
        return None if self._behind_end(drafted) else self._walker.mask(drafted)

    def permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        try:
            return self._permits(drafted, tokens)
        except ConstraintError:  # a limit: whoever asks for the mask there hears of it
            return 0

    def _permits(self, drafted: Sequence[int], tokens: Sequence[int]) -> int:
        if self._behind_end(drafted):
            return 0
        text = next((i for i, token in enumerate(tokens) if token in self._ends), len(tokens))
        text_tokens = [*drafted, *tokens[:text]]
        n = self._walker.reach(text_tokens) - len(drafted)
        if n == text < len(tokens) and self._walker.is_accepting(text_tokens):
            n += 1
        return max(n, 0)

    def forced(self, drafted: Sequence[int]) -> tuple[int, ...]:
        guide = self._walker if self._forcing else self._guide
        if guide is None or self._behind_end(drafted):
            return ()
        try:
            tokens = guide.forced(drafted)
        except ConstraintError:  # the guide is lost; what is allowed does not depend on it
            return ()
        return tuple(tokens[: self.permits(drafted, tokens)])

    def accept(self, tokens: Sequence[int]) -> None:
        if self._ended and tokens:
            raise ConstraintError("constrained output", "it has ended", "Accept nothing after an end token.")
        if (n := self._permits((), tokens)) < len(tokens):
            raise ConstraintError("constrained output", f"token {tokens[n]} may not follow there")
        self._ended = any(token in self._ends for token in tokens)
        text = tokens[: len(tokens) - self._ended]
        self._walker.advance(text)
        if self._guide is not None:
            try:
                self._guide.advance(text)
            except ConstraintError:
                self._guide = None

    @property
    def is_complete(self) -> bool:
        return self._ended or self._only_ends()

    @property
    def is_accepted(self) -> bool:
        return self._ended or self._walker.is_accepting()

    def _only_ends(self) -> bool:
        if not self._walker.is_accepting():
            return False
        mask = self._walker.mask(())
        return bool(np.count_nonzero(mask) == sum(mask[end] for end in self._ends))

    def _behind_end(self, drafted: Sequence[int]) -> bool:
        return self._ended or not self._ends.isdisjoint(drafted)
