"""What a cost curve means: the acceptance from which drafts pay, and which draft lengths to prefer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.costs.curve import CallCosts
from outrider.costs.points import MAX_TOKENS, Curve

_LONGEST_DRAFT = 16

_STAIR_RATIO = 1.03
"""A longer call that costs so little more makes a shorter one pointless."""


def expected_tokens(num_drafted: int, acceptance: float) -> float:
    """Tokens that a target call is expected to give with a draft of so many tokens, each of which is
    accepted with probability `acceptance` once those before it are: 1 + a + a² + … (Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023, equation 1).

    >>> expected_tokens(2, 0.5)
    1.75
    """
    return float(sum(acceptance**i for i in range(num_drafted + 1)))


def break_even(calls_s: Sequence[float] | Curve, num_drafted: int, draft_s: float = 0.0) -> float | None:
    """The acceptance from which drafts of so many tokens are no slower than plain decoding.

    `calls_s[n - 1]` is what a target call over n tokens takes, `draft_s` what the draft itself took.
    None where even drafts that are always accepted are slower.

    >>> break_even([1.0, 1.5, 2.0], 1), break_even([1.0, 1.5, 3.5], 2)
    (0.5, None)
    """
    needed = (float(calls_s[num_drafted]) + draft_s) / float(calls_s[0])
    return None if needed > num_drafted + 1 else acceptance_for(num_drafted, needed)


def acceptance_for(num_drafted: int, tokens: float) -> float:
    """The least acceptance at which `expected_tokens` are so many, which they can be."""
    low, high = 0.0, 1.0
    if tokens <= 1:
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(num_drafted, middle) < tokens else (low, middle)
    return high


def break_even_of(costs: CallCosts, draft: CallCosts | None, num_drafted: int) -> float | None:
    """As `break_even`, of drafts of so many tokens by a draft model that costs this; None: looked up ones."""
    drafting_s = 0.0
    if draft is not None:
        # The first call of a round reads the target's own last token along.
        drafting_s = draft.call_s(2, context=0) + (num_drafted - 1) * draft.call_s(1, context=0)
    return break_even(costs.calls_s(MAX_TOKENS, context=0), num_drafted, drafting_s)


def least_needed(costs: CallCosts, draft: CallCosts) -> float | None:
    """The least acceptance at which a draft model pays at some length; None where it pays at none."""
    needed = [break_even_of(costs, draft, n) for n in range(1, _LONGEST_DRAFT + 1)]
    return min((value for value in needed if value is not None), default=None)


def best_call(calls_s: Sequence[float] | Curve, acceptance: float) -> int:
    """The number of tokens of a target call that gives a token in the least time, drafts being free."""
    return min(
        range(1, len(calls_s) + 1),
        key=lambda n: float(calls_s[n - 1]) / expected_tokens(n - 1, acceptance),
    )


def token_s(calls_s: Sequence[float] | Curve, acceptance: float) -> float:
    """Seconds for each token at the best draft length, drafts being free."""
    best = best_call(calls_s, acceptance)
    return float(calls_s[best - 1]) / expected_tokens(best - 1, acceptance)


def good_sizes(calls_s: Sequence[float] | Curve) -> tuple[int, ...]:
    """The sizes of a call that no longer one undercuts: the outer edges of the stairs.

    >>> good_sizes([1.0, 1.5, 1.9, 1.5, 2.1])
    (1, 4, 5)
    """
    curve = np.asarray(calls_s, dtype=np.float64)
    return tuple(n for n in range(1, len(curve) + 1) if np.all(curve[n:] > _STAIR_RATIO * curve[n - 1]))
