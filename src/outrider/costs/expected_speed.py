"""How fast drafting is expected to be: the tokens of a step, over what the step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.costs.curve import MAX_TOKENS, CallCosts, Curve

LONGEST_DRAFT = 16  # tokens of the longest that is looked at


def expected_tokens(num_drafted: int, acceptance: float) -> float:
    """Tokens that a target call is expected to give with a draft of so many tokens, each of which is
    accepted with probability `acceptance` once those before it are: 1 + a + a² + … (Leviathan et al. 2023,
    equation 1).

    >>> expected_tokens(2, 0.5)
    1.75
    """
    return float(sum(acceptance**i for i in range(num_drafted + 1)))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the calls of a step cost, in any unit of time."""

    target_s: Sequence[float] | Curve  # target calls over 1, 2, … tokens
    draft_s: float = 0.0  # a draft model's call; 0 for drafts that are looked up
    first_draft_s: float | None = None  # its first, which reads the target's own token along; None: as any

    @classmethod
    def of(cls, target: CallCosts, draft: CallCosts | None = None) -> StepCosts:
        """Those at the beginning of a text, with drafts of a model or (None) looked up ones."""
        calls_s = target.calls_s(MAX_TOKENS, context=0)
        if draft is None:
            return cls(calls_s)
        return cls(calls_s, draft.call_s(1, context=0), draft.call_s(2, context=0))

    def ratio(self, num_drafted: int) -> float:
        """A step that drafts so many tokens, over a plain one."""
        first_s = self.draft_s if self.first_draft_s is None else self.first_draft_s
        drafting_s = first_s + (num_drafted - 1) * self.draft_s if num_drafted else 0.0
        return (float(self.target_s[num_drafted]) + drafting_s) / float(self.target_s[0])

    def speedup(self, num_drafted: int, acceptance: float) -> float:
        """Of drafts of so many tokens over plain decoding.

        >>> StepCosts([1.0, 1.0, 4.0], 0.25).speedup(1, 0.5)
        1.2
        """
        return expected_tokens(num_drafted, acceptance) / self.ratio(num_drafted)

    def break_even(self, num_drafted: int) -> float | None:
        """The acceptance from which drafts of so many tokens are no slower than plain ones; None: none."""
        ratio, low, high = self.ratio(num_drafted), 0.0, 1.0
        if not 1 < ratio <= num_drafted + 1:
            return 0.0 if ratio <= 1 else None
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if expected_tokens(num_drafted, middle) < ratio else (low, middle)
        return high

    def least_needed(self) -> tuple[float, int] | None:
        """The least acceptance at which some length pays, and that length."""
        found = [(self.break_even(n), n) for n in self.lengths]
        return min(((value, n) for value, n in found if value is not None), default=None)

    @property
    def lengths(self) -> range:
        """Of 1 token or more."""
        return range(1, min(LONGEST_DRAFT, len(self.target_s) - 1) + 1)


def best_call(calls_s: Sequence[float] | Curve, acceptance: float) -> int:
    """The number of tokens of a target call that gives a token in the least time, drafts being free."""
    costs = StepCosts(calls_s)
    return 1 + max(range(len(calls_s)), key=lambda n: costs.speedup(n, acceptance))
